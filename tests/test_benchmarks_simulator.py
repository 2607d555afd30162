"""The scale simulator: cases that can be worked out by hand, and what must hold whatever the costs are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulated_parts import Clock, Host, Link
from benchmarks.simulator import Cluster, Costs, predict

pytestmark = pytest.mark.timeout(240)
PLAIN = Costs(samples=100, rows=1000, compute=0.02, threads=1, row_bytes=0)
# Steps of equal length may fall into a rhythm in which all come at once, and a faster part may bring it on (Graham's
# anomalies): that more is never slower is no theorem, but holds but for so much. Hence no random examples.
NOISE = 1.2

costs = st.builds(
    Costs,
    samples=st.just(100),
    rows=st.sampled_from([100.0, 5000.0]),
    compute=st.floats(0.001, 0.05),
    threads=st.sampled_from([1.0, 1.6, 2.0]),
    prepare=st.floats(0, 0.01),
    client_request=st.floats(0, 1e-3),
    client_row=st.floats(0, 1e-6),
    server_request=st.floats(0, 1e-3),
    server_row=st.floats(0, 1e-6),
    server_step=st.floats(0, 1e-3),
    merge_row=st.floats(0, 1e-6),
    dense_bytes=st.floats(0, 1e6),
)
clusters = st.builds(
    Cluster,
    workers=st.integers(1, 4),
    servers=st.integers(1, 4),
    mode=st.sampled_from(["async", "sync"]),
    staleness=st.integers(0, 2),
    parallel_steps=st.integers(1, 2),
    bandwidth=st.sampled_from([1e7, 1e8, 1e9]),
    latency=st.sampled_from([0.0, 1e-4, 1e-3]),
)


def test_two_tasks_share_a_core_and_a_third_has_to_wait() -> None:
    clock, ends = Clock(), []
    host = Host(clock, cores=1)
    host.work("worker", 1.0, lambda: ends.append(clock.now))
    host.work("worker", 2.0, lambda: ends.append(clock.now))
    clock.run()
    assert ends == [2.0, 3.0]
    assert host.busy == pytest.approx(3.0)


def test_processes_that_share_a_host_slow_each_other_down() -> None:
    # Beside each other a tenth slower: until 1.1 both, then the second alone.
    clock, ends = Clock(), []
    host = Host(clock, cores=2, crowding=0.1)
    host.work("worker", 1.0, lambda: ends.append(clock.now))
    host.work("server", 2.0, lambda: ends.append(clock.now))
    clock.run()
    assert ends == pytest.approx([1.1, 2.1])
    assert host.used == pytest.approx({"worker": 1.1, "server": 2.1})
    # Tasks of one process do not.
    host.work("worker", 1.0, lambda: ends.append(clock.now))
    host.work("worker", 1.0, lambda: ends.append(clock.now))
    clock.run()
    assert ends[2:] == pytest.approx([3.1, 3.1])


def test_rows_of_a_message_are_work_for_all_cores_of_a_server() -> None:
    heavy = replace(PLAIN, server_request=1e-3, server_row=1e-5)
    alone = Cluster(latency=0, bandwidth=1e15, staleness=0)
    assert predict(heavy, alone).samples_per_s == pytest.approx(100 / (0.02 + 0.012))
    two = replace(heavy, server_threads=2)
    assert predict(two, alone).samples_per_s == pytest.approx(100 / (0.02 + 0.007))


def test_several_servers_cost_a_worker_the_splitting() -> None:
    split = replace(PLAIN, split_part=1e-3, split_row=1e-6)
    near = Cluster(latency=0, bandwidth=1e15, staleness=0)
    assert predict(split, near).samples_per_s == pytest.approx(100 / 0.02)
    assert predict(split, replace(near, servers=4)).samples_per_s == pytest.approx(100 / (0.02 + 0.005))


def test_the_processor_time_of_a_step_is_what_its_parts_cost() -> None:
    parts = replace(PLAIN, prepare=1e-3, client_request=1e-3, server_request=2e-3, server_row=1e-6)
    found = predict(parts, Cluster(servers=4, cores=64))
    assert found.worker_seconds == pytest.approx(0.02 + 1e-3 + 2 * 4 * 1e-3)
    assert found.server_seconds == pytest.approx(2 * 4 * 2e-3 + 1e-3)


def test_a_link_sends_one_message_after_another() -> None:
    clock, ends = Clock(), []
    link = Link(clock, bandwidth=10)
    for _ in range(2):
        link.send(20, lambda: ends.append(clock.now), latency=0.5)
    clock.run()
    assert ends == [2.5, 4.5]


def test_a_worker_alone_takes_the_time_of_its_step() -> None:
    assert predict(PLAIN, Cluster(servers=0)).samples_per_s == pytest.approx(100 / 0.02)
    # Two messages there and back: 4 ms more. With a pull ahead of the push, a step costs computing only.
    far = Cluster(latency=1e-3, bandwidth=1e15, parallel_steps=1)
    assert predict(PLAIN, replace(far, staleness=0)).samples_per_s == pytest.approx(100 / 0.024)
    assert predict(PLAIN, replace(far, staleness=1)).samples_per_s == pytest.approx(100 / 0.02, rel=0.02)
    assert predict(PLAIN, replace(far, mode="sync")).samples_per_s == pytest.approx(100 / 0.024)


def test_pulls_and_pushes_keep_their_order_where_batches_are_late() -> None:
    # Servers that wait for all workers would wait for ever if one pulled where another pushes.
    late = replace(PLAIN, compute=0.008, prepare=0.006)
    found = predict(late, Cluster(workers=2, mode="sync", staleness=1, latency=0, bandwidth=1e7))
    assert 0 < found.samples_per_s <= 2 * 100 / 0.006 * 1.01


def test_two_steps_compute_at_the_same_time_where_there_are_cores_and_rows_for_both() -> None:
    # Each has 4 ms of messages between its computing and that of the step after the next.
    two = Cluster(latency=1e-3, bandwidth=1e15, parallel_steps=2, staleness=1)
    assert predict(PLAIN, two).samples_per_s == pytest.approx(2 * 100 / 0.024, rel=0.03)
    assert predict(PLAIN, replace(two, cores=1)).samples_per_s == pytest.approx(100 / 0.02, rel=0.03)
    assert predict(PLAIN, replace(two, staleness=0)).samples_per_s == pytest.approx(100 / 0.024)
    # Without messages two cores do twice as much as one thread can, and no more for a step that has two.
    near = replace(two, latency=0.0)
    assert predict(replace(PLAIN, threads=2), near).samples_per_s == pytest.approx(100 / 0.01, rel=0.03)


def test_a_server_that_is_busy_all_the_time_is_the_limit() -> None:
    heavy = replace(PLAIN, server_row=1e-5)
    found = predict(heavy, Cluster(workers=16, cores=1, latency=0))
    assert found.samples_per_s == pytest.approx(100 / 0.01, rel=0.05)
    assert found.bottleneck == "server cores"
    # Twice the servers have half the rows each.
    assert predict(heavy, Cluster(workers=16, servers=2, cores=1, latency=0)).samples_per_s == pytest.approx(
        2 * 100 / 0.01, rel=0.1
    )


def test_a_synchronous_server_merges_all_messages_of_a_step_on_one_core() -> None:
    # 5 ms for each worker's message and 10 ms for its rows, twice a step, whatever the same rows cost alone.
    heavy = replace(PLAIN, server_request=5e-3, merge_row=2e-5, server_row=1.0)
    cluster = Cluster(workers=4, mode="sync", cores=8, latency=0, bandwidth=1e15)
    found = predict(heavy, cluster)
    assert found.samples_per_s == pytest.approx(4 * 100 / (0.02 + 2 * 4 * 0.015))
    assert found.busy["merging"] == pytest.approx(0.12 / 0.14, rel=0.01)
    assert found.bottleneck == "merging"
    # Twice the servers have half the rows each, and as many messages.
    halved = predict(heavy, replace(cluster, servers=2))
    assert halved.samples_per_s == pytest.approx(4 * 100 / (0.02 + 2 * 4 * 0.010))
    # The messages of one worker are not merged.
    alone = replace(heavy, server_row=2e-6)
    assert predict(alone, replace(cluster, workers=1)).samples_per_s == pytest.approx(100 / (0.02 + 0.012))


def test_what_a_worker_sends_to_the_server_in_its_process_is_no_message() -> None:
    far = replace(PLAIN, client_request=1e-3, server_request=1e-3, wakeup=1e-3)
    one = Cluster(placement="colocated", latency=1e-3, bandwidth=1e15, staleness=0)
    assert predict(far, one).samples_per_s == pytest.approx(100 / 0.02)
    # Two nodes: each sends one message and answers one, both twice a step, and each arrives 2 ms later.
    two = predict(far, replace(one, workers=2, servers=2, mode="sync"))
    assert two.samples_per_s == pytest.approx(2 * 100 / (0.02 + 2 * (0.001 + 0.001 + 0.003)))


def test_colocated_servers_share_the_cores_of_their_workers() -> None:
    heavy = replace(PLAIN, server_row=4e-5)
    cluster = Cluster(workers=2, servers=2, cores=1, latency=0, bandwidth=1e15)
    apart = predict(heavy, cluster).samples_per_s
    together = predict(heavy, replace(cluster, placement="colocated")).samples_per_s
    assert together == pytest.approx(2 * 100 / 0.06, rel=0.05)
    assert apart == pytest.approx(2 * 100 / 0.04, rel=0.05)


def test_a_link_that_is_full_all_the_time_is_the_limit() -> None:
    wide = replace(PLAIN, dense_bytes=1e6)
    found = predict(wide, Cluster(workers=16, bandwidth=1e8, latency=0))
    assert found.samples_per_s == pytest.approx(100 / 0.01, rel=0.1)
    assert found.bottleneck == "server link"


def test_nodes_of_one_host_share_its_cores() -> None:
    both = Cluster(workers=2, one_host=True, cores=1)
    assert predict(PLAIN, both).samples_per_s == pytest.approx(100 / 0.02, rel=0.03)
    assert predict(PLAIN, replace(both, cores=2)).samples_per_s == pytest.approx(2 * 100 / 0.02, rel=0.03)


def test_a_cluster_without_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="workers=0"):
        predict(PLAIN, Cluster(workers=0))
    with pytest.raises(ValueError, match="servers=0"):
        predict(PLAIN, Cluster(workers=2, servers=0))
    with pytest.raises(ValueError, match="workers=2, servers=3"):
        predict(PLAIN, Cluster(workers=2, servers=3, placement="colocated"))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(costs, clusters)
def test_more_of_anything_is_never_slower(found: Costs, cluster: Cluster) -> None:
    rate = predict(found, cluster, 20).samples_per_s
    for better in (
        replace(cluster, bandwidth=cluster.bandwidth * 4),
        replace(cluster, latency=cluster.latency / 4),
        replace(cluster, cores=cluster.cores * 2),
    ):
        assert predict(found, better, 20).samples_per_s * NOISE >= rate
    cheaper = replace(found, compute=found.compute / 2, server_row=found.server_row / 2)
    assert predict(cheaper, cluster, 20).samples_per_s * NOISE >= rate


@settings(max_examples=20, deadline=None, derandomize=True)
@given(costs, clusters)
def test_no_cluster_beats_its_parts(found: Costs, cluster: Cluster) -> None:
    """Neither more than all workers undisturbed, nor more than all cores of the workers at work, nor nothing."""
    result = predict(found, cluster, 20)
    steps = min(cluster.parallel_steps, cluster.ahead + 1)
    alone = found.samples / (found.compute / max(found.threads, 1))
    busy = found.samples / (found.compute / cluster.cores)
    assert 0 < result.samples_per_s <= min(alone * steps, busy) * cluster.workers * NOISE
    assert all(0 <= share <= 1 + 1e-6 for share in result.busy.values())


@settings(max_examples=15, deadline=None, derandomize=True)
@given(costs, clusters)
def test_workers_that_wait_for_each_other_are_not_faster(found: Costs, cluster: Cluster) -> None:
    found = replace(found, merge_row=found.server_row)
    rates = {
        mode: predict(found, replace(cluster, mode=mode), 20).samples_per_s  # type: ignore[arg-type]
        for mode in ("async", "sync")
    }
    assert rates["sync"] <= rates["async"] * NOISE
