"""The models and data of the training benchmark.

dlrm, wdl, deepfm    Criteo-like: 13 numbers, 26 id columns, 5.2 M ids, dim 16
bags                 40 id columns, 10 of which hold 20 ids each, 20 M ids, a small MLP: embeddings are the work
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

DENSE = 13
SAMPLES = 48 * 2048


@dataclass(frozen=True)
class Workload:
    """The data of a benchmark. Ids of each column follow a Zipf law over its ids, in a random order of ids."""

    model: str = "dlrm"
    batch: int = 2048
    batches: int = 48
    singles: int = 26  # columns of one id
    bags: int = 0  # columns of `length` ids
    length: int = 0
    ids: int = 5_200_000
    dim: int = 16
    exponent: float = 1.1
    seed: int = 7

    @property
    def fields(self) -> int:
        """Number of id columns."""
        return self.singles + self.bags

    def write(self, path: Path) -> None:
        """Generate the batches and save them."""
        random = np.random.default_rng(self.seed)
        size = self.ids // self.fields
        samples = self.batch * self.batches
        weights = np.arange(1, size + 1, dtype=np.float64) ** -self.exponent
        cumulative = np.cumsum(weights) / weights.sum()
        logits = np.zeros(samples, np.float32)

        def column(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
            ranks = np.minimum(np.searchsorted(cumulative, random.random(count)), size - 1)
            ids = random.permutation(size)[ranks]
            effects = random.normal(0, 0.5, size).astype(np.float32)[ids].reshape(samples, -1)
            logits.__iadd__(effects.mean(axis=1))
            return ids

        singles = np.empty((samples, self.singles), np.int64)
        for index in range(self.singles):
            singles[:, index] = column(samples)
        bags = np.empty((samples, self.bags, self.length), np.int64)
        for index in range(self.bags):
            bags[:, index] = column(samples * self.length).reshape(samples, self.length)
        dense = np.log1p(random.lognormal(1.0, 1.0, (samples, DENSE))).astype(np.float32)
        label = (random.random(samples) < 1 / (1 + np.exp(-logits))).astype(np.float32)
        shape = (self.batches, self.batch)
        np.savez(
            path,
            dense=dense.reshape(*shape, DENSE),
            ids=singles.reshape(*shape, self.singles),
            bags=bags.reshape(*shape, self.bags, self.length),
            label=label.reshape(shape),
            sizes=np.full(self.fields, size),
            dim=self.dim,
            model=self.model,
        )

    def distinct(self, path: Path) -> float:
        """Distinct ids of a batch of the saved data, over all columns, on average."""
        with np.load(path) as arrays:
            columns = [arrays["ids"][..., i] for i in range(self.singles)]
            columns += [arrays["bags"][:, :, i].reshape(self.batches, -1) for i in range(self.bags)]
        some = range(min(8, self.batches))
        return sum(len(np.unique(column[batch])) for column in columns for batch in some) / len(some)


WORKLOADS = {
    "dlrm": Workload("dlrm"),
    "wdl": Workload("wdl"),
    "deepfm": Workload("deepfm"),
    "bags": Workload("bags", singles=30, bags=10, length=20, ids=20_000_000),
}


def workload(model: str, batch: int, ids: int | None = None, samples: int | None = None) -> Workload:
    """A model's data at another batch size, and with another number of ids or samples."""
    found = WORKLOADS[model]
    # The same samples at any batch size. Bags are large: fewer, since memory is not what is measured.
    wanted = samples or (SAMPLES if found.length == 0 else SAMPLES // 2)
    return replace(found, batch=batch, batches=max(wanted // batch, 1), ids=ids or found.ids)
