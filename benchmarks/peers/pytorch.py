"""DLRM in PyTorch: nn.Embedding(sparse=True) and Adagrad, which has a sparse form."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from benchmarks.peers.protocol import BOTTOM, LEARNING_RATE, TOP, Data, serve, settings


def mlp(sizes: list[int], *, last_linear: bool) -> nn.Sequential:
    """Linear layers with ReLU between, and after the last unless `last_linear`."""
    layers: list[nn.Module] = []
    for width_in, width_out in itertools.pairwise(sizes):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*(layers[:-1] if last_linear else layers))


class DLRM(nn.Module):
    """Bottom MLP, embeddings, pairwise dot products, top MLP.

    With `fused` all features share one table of all ids, looked up in one call.
    """

    def __init__(self, tables: list[int], dim: int, fused: bool) -> None:
        super().__init__()
        fields = len(tables)
        self.fused = fused
        rows = [sum(tables)] if fused else tables
        self.embeddings = nn.ModuleList(nn.Embedding(count, dim, sparse=True) for count in rows)
        for table in self.embeddings:
            nn.init.uniform_(table.weight, -0.05, 0.05)
        self.register_buffer("offsets", torch.tensor([0, *tables[:-1]]).cumsum(0))
        self.bottom = mlp([13, *BOTTOM, dim], last_linear=False)
        self.top = mlp([dim + (fields + 1) * fields // 2, *TOP, 1], last_linear=True)
        rows_, columns = torch.tril_indices(fields + 1, fields + 1, offset=-1)
        self.register_buffer("pairs", rows_ * (fields + 1) + columns)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        bottom = self.bottom(dense)
        if self.fused:
            vectors = self.embeddings[0](ids + self.offsets)
        else:
            vectors = torch.stack([table(ids[:, i]) for i, table in enumerate(self.embeddings)], 1)
        all_vectors = torch.cat([bottom[:, None], vectors], 1)
        products = torch.bmm(all_vectors, all_vectors.transpose(1, 2)).flatten(1)[:, self.pairs]
        return self.top(torch.cat([bottom, products], 1))[:, 0]


def main() -> None:
    """Serve training steps."""
    options = settings()
    torch.set_num_threads(options["threads"])
    torch.manual_seed(1)
    data = Data(options["data"])
    model = DLRM(data.sizes, data.dim, options["fused"])
    optimizer = torch.optim.Adagrad(
        model.parameters(), LEARNING_RATE, initial_accumulator_value=0.1, eps=1e-7
    )
    loss_of = nn.BCEWithLogitsLoss()
    dense, ids, label = (torch.from_numpy(array) for array in (data.dense, data.ids, data.label))
    order = data.indices()

    def run(steps: int) -> float:
        total = 0.0
        for _ in range(steps):
            i = next(order)
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model(dense[i], ids[i]), label[i])
            loss.backward()
            optimizer.step()
            total += loss.item()
        return total / steps

    serve(f"torch {torch.__version__}", run)


if __name__ == "__main__":
    main()
