"""PyTorch: sparse embeddings, and Adagrad, which has a sparse form."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional

from benchmarks.peers.protocol import BAGS, BOTTOM, DEEP, LEARNING_RATE, TOP, Data, serve, settings


def mlp(sizes: list[int], *, last_linear: bool) -> nn.Sequential:
    """Linear layers with ReLU between, and after the last unless `last_linear`."""
    layers: list[nn.Module] = []
    for width_in, width_out in itertools.pairwise(sizes):
        layers += [nn.Linear(width_in, width_out), nn.ReLU()]
    return nn.Sequential(*(layers[:-1] if last_linear else layers))


class Embeddings(nn.Module):
    """The vectors of all id columns: `[B, columns, dim]`; bags are means.

    With `fused` all columns share one table of all ids, looked up in one call for single ids and one for bags.
    """

    def __init__(self, data: Data, dim: int, fused: bool) -> None:
        super().__init__()
        self.fused, self.singles = fused, data.singles
        rows = [sum(data.sizes)] if fused else data.sizes
        # An EmbeddingBag's table is looked up without pooling by the functional form, so both may share it.
        self.tables = nn.ModuleList(nn.EmbeddingBag(count, dim, mode="mean", sparse=True) for count in rows)
        for table in self.tables:
            nn.init.uniform_(table.weight, -0.05, 0.05)
        self.register_buffer("offsets", torch.tensor([0, *data.sizes[:-1]]).cumsum(0))

    def forward(self, ids: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
        """Look up `[B, columns]` and `[B, columns, length]`."""
        singles, batch, count = self.singles, bags.shape[0], bags.shape[1]
        if self.fused:
            table = self.tables[0]
            vectors = functional.embedding(ids + self.offsets[:singles], table.weight, sparse=True)
            if not count:
                return vectors
            shifted = (bags + self.offsets[singles:, None]).reshape(batch * count, -1)
            return torch.cat([vectors, table(shifted).reshape(batch, count, -1)], 1)
        parts = [functional.embedding(ids[:, i], self.tables[i].weight, sparse=True) for i in range(singles)]
        parts += [self.tables[singles + i](bags[:, i]) for i in range(count)]
        return torch.stack(parts, 1)


class Model(nn.Module):
    """DLRM, wide and deep, DeepFM, or an MLP over embeddings: the same as `keras_models`."""

    def __init__(self, data: Data, fused: bool) -> None:
        super().__init__()
        self.kind, dim, fields = data.model, data.dim, len(data.sizes)
        self.embeddings = Embeddings(data, dim, fused)
        if self.kind == "dlrm":
            self.bottom = mlp([13, *BOTTOM, dim], last_linear=False)
            self.top = mlp([dim + (fields + 1) * fields // 2, *TOP, 1], last_linear=True)
            rows, columns = torch.tril_indices(fields + 1, fields + 1, offset=-1)
            self.register_buffer("pairs", rows * (fields + 1) + columns)
        elif self.kind == "bags":
            self.top = mlp([fields * dim, *BAGS, 1], last_linear=True)
        else:
            self.weights = Embeddings(data, 1, fused)
            self.linear = nn.Linear(13, 1)
            self.top = mlp([13 + fields * dim, *DEEP, 1], last_linear=True)

    def forward(self, dense: torch.Tensor, ids: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
        """Logits `[B]`."""
        vectors = self.embeddings(ids, bags)
        if self.kind == "dlrm":
            bottom = self.bottom(dense)
            all_vectors = torch.cat([bottom[:, None], vectors], 1)
            products = torch.bmm(all_vectors, all_vectors.transpose(1, 2)).flatten(1)[:, self.pairs]
            return self.top(torch.cat([bottom, products], 1))[:, 0]
        if self.kind == "bags":
            return self.top(vectors.flatten(1))[:, 0]
        logit = self.linear(dense) + self.weights(ids, bags).sum(1)
        if self.kind == "deepfm":
            square_of_sum, sum_of_squares = vectors.sum(1).square(), vectors.square().sum(1)
            logit = logit + 0.5 * (square_of_sum - sum_of_squares).sum(1, keepdim=True)
        return (logit + self.top(torch.cat([dense, vectors.flatten(1)], 1)))[:, 0]


def main() -> None:
    """Serve training steps."""
    options = settings()
    torch.set_num_threads(options["threads"])
    torch.manual_seed(1)
    data = Data(options["data"])
    model = Model(data, options["fused"])
    optimizer = torch.optim.Adagrad(
        model.parameters(), LEARNING_RATE, initial_accumulator_value=0.1, eps=1e-7
    )
    loss_of = nn.BCEWithLogitsLoss()
    dense, ids, bags, label = (
        torch.from_numpy(array) for array in (data.dense, data.ids, data.bags, data.label)
    )
    order = data.indices()

    def run(steps: int) -> float:
        total = 0.0
        for _ in range(steps):
            i = next(order)
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(model(dense[i], ids[i], bags[i]), label[i])
            loss.backward()
            optimizer.step()
            total += loss.item()
        return total / steps

    serve(f"torch {torch.__version__}", run)


if __name__ == "__main__":
    main()
