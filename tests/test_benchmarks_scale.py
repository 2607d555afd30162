"""The scale benchmark: costs from observations, where scaling stops, and a coordinator with nodes that are played."""

from __future__ import annotations

import itertools
import json
import math
import xml.etree.ElementTree as ET
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import node_load, split_costs
from benchmarks.contestants import Peer
from benchmarks.peers import protocol
from benchmarks.plots import line_chart
from benchmarks.request_costs import FEW, MANY, RequestCosts, costs_between, measure
from benchmarks.scale import observe
from benchmarks.scale_costs import (
    CALIBRATION,
    CHECKS,
    LARGE,
    SMALL,
    Configuration,
    Observation,
    averaged,
    between_hosts,
    costs_apart,
    costs_of,
    dense_floats,
)
from benchmarks.scale_leases import lease_rows, reserve_rows, smallest_epoch
from benchmarks.scale_report import Check, Report, held_mib
from benchmarks.server import Load, draw_keys
from benchmarks.simulator import Cluster, Costs, Prediction, predict
from benchmarks.split_costs import SplitCosts
from benchmarks.workloads import Workload
from tests.lengths import ALL

ROWS = {SMALL: 8_000.0, LARGE: 24_000.0}
COMPUTE = {SMALL: 0.016, LARGE: 0.05}
REQUESTS = RequestCosts(client_request=2e-4, client_row=6e-8, server_request=3e-4, server_row=6e-7)
SPLIT = SplitCosts(part=1e-4, row=4e-8)
SERVER_STEP, MERGE_ROW = 1e-3, 9e-7


def observation(
    servers: int, workers: int, batch: int, samples_per_s: float = 30_000.0, intra: int | None = 1
) -> Observation:
    """What nodes with known costs would be seen to use in a step; two workers are synchronous."""
    stages = {
        "read": 1e-3,
        "prepare": 1e-3,
        "pull": 1e-3,
        "push": 2e-3,
        "compute": COMPUTE[batch] / 2 - 1e-3,
        "measure": 1e-3,
        "wait": 0.0,
    }
    rows = ROWS[batch]
    beside = 2 * REQUESTS.client_request + rows * REQUESTS.client_row if servers else 6e-3
    row = REQUESTS.server_row if workers == 1 else MERGE_ROW
    served = 2 * REQUESTS.server_request + SERVER_STEP + rows * row if servers else 0.0
    staleness = 0 if servers and workers == 1 else None
    return Observation(
        Configuration(
            servers,
            workers,
            batch,
            "sync" if workers == 2 else "async",
            staleness,
            intra=None if staleness is None else intra,
        ),
        rows,
        samples_per_s,
        worker_seconds=COMPUTE[batch] + 2e-3 + beside,
        server_seconds=served,
        stages=stages,
    )


def observations() -> list[Observation]:
    return [
        *(observation(0, 1, batch) for batch in (SMALL, LARGE)),
        observation(1, 1, SMALL, 20_000.0),
        *(observation(1, 1, LARGE, intra=intra) for intra in (None, 1)),
        *(observation(1, 2, batch) for batch in (SMALL, LARGE)),
        crowded(),
    ]


def crowded(more: float = 1.0) -> Observation:
    """What the nodes of 2+2 would be seen to use, by so much more than if they did not disturb each other."""
    rows, split = ROWS[SMALL], 2 * SPLIT.part + ROWS[SMALL] * SPLIT.row
    return Observation(
        Configuration(2, 2, SMALL),
        rows,
        30_000.0,
        worker_seconds=more
        * (COMPUTE[SMALL] + 2e-3 + 4 * REQUESTS.client_request + rows * REQUESTS.client_row + split),
        server_seconds=more * (4 * REQUESTS.server_request + SERVER_STEP + rows * REQUESTS.server_row),
    )


def test_costs_are_found_again_in_what_is_seen_of_them() -> None:
    costs = costs_of(observations(), REQUESTS, SPLIT)
    for batch in (SMALL, LARGE):
        found = costs[batch]
        assert (found.samples, found.rows) == (batch, ROWS[batch])
        assert found.compute == pytest.approx(COMPUTE[batch])
        assert found.threads == pytest.approx(2.0)
        assert found.prepare == pytest.approx(2e-3)
        assert {name: getattr(found, name) for name in asdict(REQUESTS)} == asdict(REQUESTS)
        assert found.server_step == pytest.approx(SERVER_STEP)
        # The tables of the worker alone: 6 ms in two threads, which waited 3 ms.
        assert found.rows * found.embedded_row == pytest.approx(6e-3)
        assert found.embedded_threads == pytest.approx(2.0)
        # Four nodes were seen to use no more than their parts cost, and so the server of two merges undisturbed.
        assert found.crowding == pytest.approx(0.0, abs=1e-4)
        assert found.merge_row == pytest.approx(MERGE_ROW, rel=1e-3)
    # The wait of messages is chosen so that one server and one worker at the small batch come out right.
    assert predict(costs[SMALL], Cluster(staleness=0, one_host=True)).samples_per_s == pytest.approx(
        20_000, rel=0.01
    )


def test_rows_cost_no_more_than_the_nodes_used() -> None:
    dear = replace(REQUESTS, client_row=1.0, server_row=1.0)
    for batch, found in costs_of(observations(), dear, SPLIT).items():
        rows = ROWS[batch]
        assert found.server_step == 0.0
        assert rows * found.server_row == pytest.approx(rows * REQUESTS.server_row + SERVER_STEP)
        assert rows * found.merge_row == pytest.approx(rows * MERGE_ROW + SERVER_STEP, rel=1e-3)


def test_nodes_that_use_more_beside_each_other_tell_of_crowding() -> None:
    four = crowded(1.2)
    costs = costs_of([*observations()[:-1], four], REQUESTS, SPLIT)
    assert 0.05 < costs[SMALL].crowding < 0.2
    assert costs[LARGE].crowding == costs[SMALL].crowding
    found = predict(costs[SMALL], four.cluster())
    assert found.worker_seconds + found.server_seconds == pytest.approx(
        four.worker_seconds + four.server_seconds, rel=0.02
    )
    merged = predict(costs[SMALL], observation(1, 2, SMALL).cluster())
    assert merged.server_seconds == pytest.approx(observation(1, 2, SMALL).server_seconds, rel=0.02)


def test_several_servers_cost_a_worker_more() -> None:
    seconds = {(1, FEW): 1e-4, (1, MANY): 2e-4, (2, FEW): 6e-4, (2, MANY): 9e-4, (8, FEW): 1.6e-3}
    rows = 26 * (250 - 4)
    found = split_costs.costs_between(seconds)
    assert found.part == pytest.approx(2e-4 - 1e-4)
    assert rows * found.row == pytest.approx(3e-4 - 1e-4)
    assert split_costs.costs_between(dict.fromkeys(seconds, 1e-4)) == SplitCosts(0.0, 0.0)


def test_what_several_servers_cost_is_measured() -> None:
    found = split_costs.measure(steps=3, rounds=1)
    assert 0 < found.part < 0.01
    assert 0 <= found.row < 1e-5


def test_hosts_apart_have_the_costs_of_a_worker_that_splits_operations() -> None:
    seen = [
        replace(one, worker_seconds=one.worker_seconds + 4e-3)
        if one.configuration == Configuration(1, 1, staleness=0)
        else one
        for one in observations()
    ]
    requests = {"swept": REQUESTS, "unix": REQUESTS, "tcp": REQUESTS}
    shared = costs_of(seen, REQUESTS, SPLIT)[LARGE]
    apart = costs_apart(seen, shared, requests)
    assert apart.compute == pytest.approx(shared.compute + 4e-3)
    assert (apart.crowding, apart.merge_row, apart.wakeup) == (0.0, shared.merge_row, shared.wakeup)
    assert (apart.split_part, apart.split_row) == (SPLIT.part, SPLIT.row)


def test_passes_are_averaged_by_step() -> None:
    one = observation(1, 1, SMALL, 10_000.0)
    two = replace(one, samples_per_s=30_000.0, worker_seconds=one.worker_seconds + 2e-3)
    [mean] = averaged([one, two])
    assert mean.samples_per_s == pytest.approx(15_000.0)
    assert mean.worker_seconds == pytest.approx(one.worker_seconds + 1e-3)
    assert mean.stages == pytest.approx(one.stages)


def test_between_hosts_messages_cost_what_they_do_there() -> None:
    here = costs_of(observations(), REQUESTS, SPLIT)[LARGE]
    there = between_hosts(here, REQUESTS, RequestCosts(5e-4, 8e-8, 7e-4, 9e-7))
    assert (there.client_request, there.server_request) == (5e-4, 7e-4)
    assert there.client_row == pytest.approx(REQUESTS.client_row + 2e-8)
    assert there.server_row == pytest.approx(REQUESTS.server_row + 3e-7)
    assert there.merge_row == pytest.approx(here.merge_row + 3e-7)
    assert (there.compute, there.server_step) == (here.compute, here.server_step)
    noisy = between_hosts(here, REQUESTS, replace(REQUESTS, client_row=0.0, server_row=0.0))
    assert (noisy.client_row, noisy.server_row, noisy.merge_row) == (
        here.client_row,
        here.server_row,
        here.merge_row,
    )


def test_keys_of_a_request_are_distinct_and_the_frequent_ones_are_in_each() -> None:
    random = np.random.default_rng(0)
    drawn = [draw_keys(MANY, random) for _ in range(4)]
    assert all(len(np.unique(keys)) == len(keys) == MANY.rows for keys in drawn)
    assert all({0, 1, 2} <= set(keys.tolist()) for keys in drawn)
    assert len(draw_keys(FEW, random)) == FEW.rows


def test_what_rows_cost_is_told_from_what_requests_cost() -> None:
    def seconds(load: Load) -> tuple[float, float]:
        rows = load.tables * load.rows / 2  # half of a step's costs in each of its two requests
        return (
            REQUESTS.client_request + rows * REQUESTS.client_row,
            REQUESTS.server_request + rows * REQUESTS.server_row,
        )

    found = costs_between(seconds(FEW), seconds(MANY))
    assert asdict(found) == pytest.approx(asdict(REQUESTS))


@pytest.mark.timeout(120)
def test_requests_and_rows_are_measured() -> None:
    costs = measure(seconds=0.1, rounds=1)
    assert list(costs) == ["unix", "swept", "tcp"]
    for found in costs.values():
        # Microseconds and nanoseconds, not what several requests or none would be.
        assert 1e-5 < found.client_request < 1e-2
        assert 1e-5 < found.server_request < 1e-2
        assert 1e-9 < found.server_row < 1e-5
    assert costs["swept"].client_row == costs["unix"].client_row


def test_every_configuration_has_its_place_in_the_simulator() -> None:
    together = Configuration(0, 2, SMALL, "sync", placement="colocated")
    assert together.name == "2 colocated sync"
    cluster = Observation(together, 1.0, 1.0, 0.0, 0.0).cluster()
    assert (cluster.workers, cluster.servers, cluster.placement) == (2, 2, "colocated")
    both = [*CALIBRATION, *CHECKS]
    assert len({(one.name, one.batch) for one in both}) == len(both)
    for batch in (SMALL, LARGE):
        assert {"2+2 sync", "1+2 sync", "2 colocated sync"} <= {
            one.name for one in both if one.batch == batch
        }
    costs = costs_of(observations(), REQUESTS, SPLIT)
    for one in both:
        seen = Observation(one, 1.0, 1.0, 0.0, 0.0)
        assert predict(costs[one.batch], seen.cluster(), 9).samples_per_s > 0


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


def report(predicted: float = 90.0) -> Report:
    def found(rate: float, busy: float, merging: float = 0.0) -> Prediction:
        return Prediction(rate, {"merging": merging, "server cores": busy, "worker cores": 0.5})

    grid = {
        ("async", 1, 1): found(100.0, 0.2),
        ("async", 4, 1): found(300.0, 0.7),
        ("async", 16, 1): found(400.0, 1.0),
        ("async", 1, 2): found(100.0, 0.1),
        ("async", 4, 2): found(400.0, 0.4),
        ("async", 16, 2): found(1000.0, 0.7),
        ("sync", 1, 1): found(100.0, 0.2),
        ("sync", 4, 1): found(190.0, 0.45, 0.9),
        ("sync", 16, 1): found(200.0, 0.48, 0.96),
        ("sync", 1, 2): found(100.0, 0.2),
        ("sync", 4, 2): found(220.0, 0.3, 0.6),
        ("sync", 16, 2): found(300.0, 0.35, 0.7),
    }
    checks = [Check("1+1", 512, 100.0, 100.0, 0.0, True), Check("2+2", 512, 100.0, predicted, 0.25, False)]
    loads = [
        node_load.NodeLoad(n, 1, 1.0, 60.0 + n, 20, 0.01, 100.0 * n, 0.5, {1: 1.0, 8: 2.25}) for n in (8, 16)
    ]
    costs = Costs(512, 8000, 0.02)
    return Report(
        {512: costs}, replace(costs, client_request=0.25), checks, grid, loads, 512, 10.0, 100.0, 2.0
    )


def test_scaling_stops_where_workers_do_less_than_half_of_what_one_alone_does() -> None:
    one, two, *_ = report().limits()
    assert (one.workers, one.samples_per_s) == (4, 300.0)
    assert "servers' cores are busy" in one.reason
    assert two.workers == 16
    assert "not within" in two.reason


def test_a_core_that_merges_all_the_time_is_named_and_what_is_busiest_where_nothing_is() -> None:
    *_, one, two = report().limits()
    assert (one.mode, one.servers, one.workers) == ("sync", 1, 1)
    assert "merges the workers' messages on one core" in one.reason
    assert (two.servers, two.workers) == (2, 4)
    assert "take turns" in two.reason
    assert "busiest: merging, 70 %" in two.reason


def test_the_report_has_errors_and_tables() -> None:
    result, text = report().result(), report().text()
    assert result["worst_error"] == 0.1
    assert result["errors"] == {"1+1 512": 0.0, "2+2 512": -0.1}
    assert result["best"] == {"mode": "async", "workers": 16, "servers": 2}
    assert "| 2+2 | 512 | 100 | 90 | -10 % | 0.25 |  |" in text
    assert "| 16 | 400 | 1,000 |" in text
    assert "| client_request | 0 | 0.25 |" in text
    # Of a worker's client: that of the coordinator, then with its connections to servers.
    assert "| 0.5 | 1.5 | 2.8 |" in text


def test_the_report_says_in_words_whether_messages_wait() -> None:
    found = report()
    assert "No wait of messages was found" in found.text()
    waits = replace(found, remote=replace(found.remote, wakeup=2.5e-4))
    assert "A message waits for 250 µs" in waits.text()


@pytest.mark.parametrize(("predicted", "status"), [(81.0, 0), (121.0, 1), (79.0, 1)])
def test_a_simulator_that_is_off_by_more_than_a_fifth_ends_with_status_1(
    predicted: float,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("benchmarks.scale_report.FOLDER", tmp_path)
    assert report(predicted).conclude(docs=True) == status
    assert (tmp_path / "scale.md").read_text().startswith("# Training past one machine")
    *_, said, last = capsys.readouterr().out.splitlines()
    result = json.loads(last.removeprefix("RESULT "))
    assert result["worst_error"] == pytest.approx(abs(predicted / 100 - 1))
    assert ("The simulator is off by" in said and "2+2 at batch 512" in said) == bool(status)


def test_a_server_holds_the_pushes_of_all_workers() -> None:
    costs = Costs(2048, 23_000, 0.04, row_bytes=64, dense_bytes=2**21)
    # 23,000 rows of 64 bytes and their keys of 8, and 2 MiB of dense gradients, from each.
    assert held_mib(costs, 1000, 4) == pytest.approx(250 * (23_000 * 72 / 2**20 + 2))


def test_epochs_whose_leases_are_too_small_for_the_coordinator() -> None:
    # 16 leases for each worker, of whole batches, between one batch and 65,536 rows.
    assert lease_rows(16 * 10 * 5_000, workers=10, batch=2048) == 4096
    assert lease_rows(100, workers=10, batch=2048) == 2048
    assert lease_rows(10**12, workers=10, batch=2048) == 65_536
    assert smallest_epoch(200_000, leases_per_s=100, workers=10, batch=2048) == 0
    # 3,000 rows for each lease: two batches of 2,048, for 160 leases.
    epoch = smallest_epoch(300_000, leases_per_s=100, workers=10, batch=2048)
    assert epoch == 2 * 2048 * 160
    assert lease_rows(epoch, workers=10, batch=2048) == 4096
    assert smallest_epoch(7e6, leases_per_s=100, workers=10, batch=2048) is None
    assert reserve_rows(workers=101, batch=512) == 10 * 100 * 512


def test_lines_rise_to_the_right_in_the_plot() -> None:
    root = ET.fromstring(line_chart({"1 server": [(1, 10), (10, 100), (100, 1000)]}, "Title"))
    [line] = root.iter("{http://www.w3.org/2000/svg}polyline")
    points = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    assert points == sorted(points)
    assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)


@pytest.mark.timeout(240)
# Two jobs on a local Spark.
@ALL
def test_nodes_of_one_configuration_follow_those_of_another(tmp_path: Path) -> None:
    generated = Workload(batch=64, batches=6, ids=2600)
    data = tmp_path / "data.npz"
    generated.write(data)
    alone = Configuration(0, 1, 64)
    together = Configuration(0, 2, 64, "sync", placement="colocated")
    peer = Peer("nodes", "benchmarks.peers.nodes", (), pause=False)
    first = {**alone.settings(), "slots": 2}
    with (tmp_path / "log").open("w") as log, peer.start(peer.python(), data, first, log) as process:
        assert process.ready["version"] == "deeprec-spark, 0 servers, 1 workers"
        process.ask({"steps": 1})
        ready = process.ask({"fit": {"data": str(data), **together.settings()}})
        assert ready["version"] == "deeprec-spark, 0 servers, 2 workers"
        seen = observe(together, process, generated.distinct(data), generated.batches)
    assert seen.cluster().placement == "colocated"
    assert seen.samples_per_s > 0
    assert seen.worker_seconds > 0
    assert seen.server_seconds == 0  # servers are in the workers


@pytest.mark.timeout(120)
def test_played_nodes_register_lease_and_leave(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        [load] = node_load.measure([6], log, idle_seconds=0.1)
    assert (load.nodes, load.servers) == (6, 1)
    assert load.leases_per_s > 0
    assert load.driver_threads > 6
    assert list(load.store_mib) == [1, 4, 8]
    # A thread, a socket and what was received, for each server more.
    assert 0 < load.store_mib[4] < load.store_mib[8] < 100
    assert "Still running" not in (tmp_path / "log").read_text()
