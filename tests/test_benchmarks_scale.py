"""The scale benchmark: costs from observations, where scaling stops, and a coordinator with nodes that are played."""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ET
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import node_load
from benchmarks.peers import protocol
from benchmarks.scale_costs import LARGE, SMALL, Configuration, Observation, costs_of, dense_floats
from benchmarks.scale_report import Check, Report, line_chart
from benchmarks.simulator import Cluster, Costs, Prediction, predict
from benchmarks.workloads import Workload

ROWS = {SMALL: 8_000.0, LARGE: 24_000.0}
COMPUTE = {SMALL: 0.016, LARGE: 0.05}
CLIENT_ROW, CLIENT_REQUEST, SERVER_ROW, SERVER_REQUEST, SERVER_STEP = 2e-7, 1e-3, 4e-7, 5e-4, 1e-3


def observation(servers: int, batch: int, samples_per_s: float = 30_000.0) -> Observation:
    """What nodes with known costs would be seen to use in a step."""
    stages = {
        "read": 1e-3,
        "prepare": 1e-3,
        "pull": 1e-3,
        "push": 2e-3,
        "compute": COMPUTE[batch] / 2 - 1e-3,
        "measure": 1e-3,
        "wait": 0.0,
    }
    beside = 3e-3 if servers == 0 else 2 * servers * CLIENT_REQUEST + ROWS[batch] * CLIENT_ROW
    served = 2 * servers * SERVER_REQUEST + SERVER_STEP + ROWS[batch] * SERVER_ROW
    return Observation(
        Configuration(servers, 1, batch, staleness=0 if servers else None),
        ROWS[batch],
        samples_per_s,
        worker_seconds=COMPUTE[batch] + 2e-3 + beside,
        server_seconds=served if servers else 0.0,
        stages=stages,
    )


def observations() -> list[Observation]:
    return [
        observation(0, SMALL), observation(0, LARGE), observation(1, SMALL, 20_000.0), observation(1, LARGE),
        observation(2, LARGE),
    ]  # fmt: skip


def test_costs_are_found_again_in_what_is_seen_of_them() -> None:
    costs = costs_of(observations())
    for batch in (SMALL, LARGE):
        found = costs[batch]
        assert (found.samples, found.rows) == (batch, ROWS[batch])
        assert found.compute == pytest.approx(COMPUTE[batch])
        assert found.threads == pytest.approx(2.0)
        assert found.prepare == pytest.approx(2e-3)
        assert found.client_row == pytest.approx(CLIENT_ROW)
        assert found.client_request == pytest.approx(CLIENT_REQUEST)
        assert found.server_row == pytest.approx(SERVER_ROW)
        assert found.server_request == pytest.approx(SERVER_REQUEST)
        assert found.server_step == pytest.approx(SERVER_STEP)
    # The wait of messages is chosen so that one server and one worker at the small batch come out right.
    assert predict(costs[SMALL], Cluster(staleness=0, one_host=True)).samples_per_s == pytest.approx(
        20_000, rel=0.01
    )


def test_observations_survive_json() -> None:
    [first, *_] = observations()
    assert Observation.from_dict(asdict(first)) == first


def test_the_dense_weights_are_those_of_the_model() -> None:
    bottom = [13, *protocol.BOTTOM, 16]
    top = [16 + math.comb(27, 2), *protocol.TOP, 1]
    expected = sum(a * b + b for widths in (bottom, top) for a, b in itertools.pairwise(widths))
    assert dense_floats() == expected


def test_distinct_ids_are_counted_by_column(tmp_path: Path) -> None:
    small = Workload(batch=200, batches=2, singles=2, bags=1, length=3, ids=3)
    small.write(tmp_path / "data.npz")
    # One id in each column.
    assert small.distinct(tmp_path / "data.npz") == 3


def report() -> Report:
    def found(rate: float, busy: float) -> Prediction:
        return Prediction(rate, {"server cores": busy, "worker cores": 0.5})

    grid = {
        ("async", 1, 1): found(100.0, 0.2),
        ("async", 4, 1): found(300.0, 0.7),
        ("async", 16, 1): found(400.0, 1.0),
        ("async", 1, 2): found(100.0, 0.1),
        ("async", 4, 2): found(400.0, 0.4),
        ("async", 16, 2): found(1000.0, 0.7),
    }
    checks = [Check("1+1", 512, 100.0, 100.0, 0.0, True), Check("2+2", 512, 100.0, 90.0, 0.25, False)]
    loads = [node_load.NodeLoad(n, 1, 1.0, 60.0 + n, 20, 0.01, 100.0 * n, 0.5) for n in (8, 16)]
    costs = {512: Costs(512, 8000, 0.02)}
    return Report(costs, checks, grid, loads, 512, 10.0, 100.0, 2.0)


def test_scaling_stops_where_workers_do_less_than_half_of_what_one_alone_does() -> None:
    one, two = report().limits()
    assert (one.workers, one.samples_per_s) == (4, 300.0)
    assert "servers' cores are busy" in one.reason
    assert two.workers == 16
    assert "not within" in two.reason


def test_the_report_has_errors_and_tables() -> None:
    result, text = report().result(), report().text()
    assert result["worst_error"] == 0.1
    assert result["errors"] == {"1+1 512": 0.0, "2+2 512": -0.1}
    assert result["best"] == {"mode": "async", "workers": 16, "servers": 2}
    assert "| 2+2 | 512 | 100 | 90 | -10 % | 0.25 |  |" in text
    assert "| 16 | 400 | 1,000 |" in text


def test_lines_rise_to_the_right_in_the_plot() -> None:
    root = ET.fromstring(line_chart({"1 server": [(1, 10), (10, 100), (100, 1000)]}, "Title"))
    [line] = root.iter("{http://www.w3.org/2000/svg}polyline")
    points = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    assert points == sorted(points)
    assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)


@pytest.mark.timeout(120)
def test_played_nodes_register_lease_and_leave(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        [load] = node_load.measure([6], log, idle_seconds=0.1)
    assert (load.nodes, load.servers) == (6, 1)
    assert load.leases_per_s > 0
    assert load.driver_threads > 6
    assert "Still running" not in (tmp_path / "log").read_text()
