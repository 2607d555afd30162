"""One small cluster, one small data set and one driver for all fault tests."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deeprec_spark.platform.standalone import StandaloneCluster
from tests.faults.harness import Data, Driver, FaultRun
from tests.faults.record import Recorder

ROWS = 8000
FILES = 4


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run all faults where they are asked for, and a part of them in the ordinary tests."""
    if "faults" in config.option.markexpr or os.environ.get("DEEPREC_TEST_ALL"):
        return
    for item in items:
        if item.get_closest_marker("all_faults"):
            item.add_marker(pytest.mark.skip(reason="runs with `pytest -m faults` and `make test-all`"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Faults that were skipped are told of in the page, with the reason."""
    report = yield
    _recorder().not_run(item.name, report)
    return report


def make_rows(chance: np.random.Generator, first: int, count: int) -> pa.Table:
    """Rows whose label depends on two ids."""
    a, b = chance.integers(0, 97, count), chance.integers(0, 53, count)
    weights = np.random.default_rng(5)
    score = weights.normal(0, 2, 97)[a] + weights.normal(0, 1.5, 53)[b]
    y = (chance.random(count) < 1 / (1 + np.exp(-score))).astype(np.int32)
    return pa.table({"row": np.arange(first, first + count), "a": a, "b": b, "y": y})


@pytest.fixture(scope="session")
def fault_data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Training rows in several files, numbered from 0, and test rows."""
    place = tmp_path_factory.mktemp("fault-data")
    chance = np.random.default_rng(1)
    for name, files, rows in (("train", FILES, ROWS), ("test", 1, 4000)):
        (place / name).mkdir()
        for number in range(files):
            part = make_rows(chance, number * rows // files, rows // files)
            pq.write_table(part, place / name / f"part-{number}.parquet", row_group_size=rows // files // 2)
    return Data(str(place / "train"), str(place / "test"), ROWS)


@pytest.fixture(scope="session")
def fault_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    """Room for two jobs of three nodes."""
    place = tmp_path_factory.mktemp("fault-cluster")
    with StandaloneCluster(executors=6, executor_memory_mb=512, directory=place) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def fault_driver(
    fault_cluster: StandaloneCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Driver]:
    """A driver with three executors that most tests share."""
    driver = Driver(fault_cluster, tmp_path_factory.mktemp("fault-driver"), executors=3)
    yield driver
    driver.close()


@pytest.fixture(scope="session")
def undisturbed(
    fault_driver: Driver, fault_data: Data, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The outcome of a fit that nothing happens to."""
    return FaultRun(fault_driver, fault_data, tmp_path_factory.mktemp("undisturbed")).done(400)


def _recorder() -> Recorder:
    place = os.environ.get("DEEPREC_FAULT_RECORD")
    return Recorder(Path(place) if place else None)


@pytest.fixture
def recorder() -> Recorder:
    """Takes down outcomes for docs/reliability.md, if DEEPREC_FAULT_RECORD names a file; else just keeps them."""
    return _recorder()
