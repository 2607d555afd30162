"""The coordinator over real calls, with workers played by threads of the test."""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from deeprec_spark.runtime.coordinator import Coordinator, CoordinatorOptions, Phase
from deeprec_spark.runtime.errors import (
    ConnectionLostError,
    JobEndedError,
    NodeError,
    RegistrationError,
    StaleNodeError,
)
from deeprec_spark.runtime.orders import Answer
from deeprec_spark.runtime.work_queue import WorkQueue
from deeprec_spark.runtime.worker_client import Heartbeat, WorkerClient


class Job:
    """A coordinator and clients that the test drives."""

    def __init__(self, num_ps=1, num_workers=2, **options):
        defaults = {
            "heartbeat_interval": 0.2,
            "heartbeat_timeout": 30.0,
            "failure_grace": 0.2,
            "registration_timeout": 30,
        }
        self.coordinator = Coordinator(CoordinatorOptions(num_ps, num_workers, **{**defaults, **options}))
        self.clients = []
        self.pool = ThreadPoolExecutor(8)

    def client(self, rank, attempt="first"):
        client = WorkerClient(self.coordinator.address, token=self.coordinator.token, rank=rank)
        assert client.claim(attempt, "host-a", timeout=0)["status"] == "accepted"
        self.clients.append(client)
        return client

    def node(self, rank, attempt="first"):
        client = self.client(rank, attempt)
        client.announce(f"host-a:{rank + 1}" if rank in self.coordinator.options.server_ranks else None)
        return client

    def all_nodes(self):
        return [self.node(rank) for rank in range(self.coordinator.options.num_nodes)]

    def run_phase(self, *arguments, **more):
        return self.pool.submit(self.coordinator.run_phase, *arguments, **more)

    def close(self):
        self.coordinator.stop(timeout=0)
        for client in self.clients:
            client.close()
        self.pool.shutdown(wait=True)


@pytest.fixture
def start_job():
    jobs = []

    def start(*arguments, **options):
        jobs.append(Job(*arguments, **options))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def work(client, counted=None):
    """A worker's loop over one phase; the number of items it did."""
    task = client.next_phase()
    done = 0
    for item in client.items():
        done += 1
        if counted is not None:
            counted.append((client.rank, item["n"]))
    client.finish({"kind": task.kind, "done": done}, blob=bytes([client.rank]))
    return done


def test_a_phase_is_handed_out_and_results_come_back_in_rank_order(start_job):
    job = start_job()
    _, one, two = job.all_nodes()
    counted = []
    running = job.run_phase(Phase("train", {"epoch": 3}, items=[{"n": n} for n in range(11)]))
    done = list(job.pool.map(lambda client: work(client, counted), [two, one]))
    results = running.result(30)
    assert [result.rank for result in results] == [1, 2]
    assert [result.blob for result in results] == [b"\1", b"\2"]
    assert sum(done) == sum(result.data["done"] for result in results) == 11
    assert sorted(n for _, n in counted) == list(range(11))


def test_assigned_items_stay_with_their_rank(start_job):
    job = start_job()
    _, one, two = job.all_nodes()
    counted = []
    assignment = [[{"n": 1}, {"n": 2}], [{"n": 3}]]
    running = job.run_phase(Phase("train", assignment=assignment, blob=b"weights"))
    list(job.pool.map(lambda client: work(client, counted), [one, two]))
    running.result(30)
    assert sorted(counted) == [(1, 1), (1, 2), (2, 3)]


def test_a_phase_for_some_ranks_leaves_the_others_waiting(start_job):
    job = start_job()
    _, one, two = job.all_nodes()
    waiting = job.pool.submit(two.next_phase)
    running = job.run_phase(Phase("save", ranks=[1], blob=b"xyz"))
    task = one.next_phase()
    assert (task.kind, task.blob, task.items) == ("save", b"xyz", ())
    one.finish({"nan": float("nan")})
    assert str(running.result(30)[0].data["nan"]) == "nan"
    assert not waiting.done()
    running = job.run_phase(Phase("next"))
    assert waiting.result(30).kind == "next"


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        ({"ranks": [0]}, r"1 to 2 here \(lower ones are servers\). Received: ranks=\[0\]"),
        ({"ranks": []}, r"ranks=\[\]"),
        ({"ranks": [2, 1]}, r"ranks=\[2, 1\]"),
        ({"assignment": [[]]}, "Received: 1"),
    ],
)
def test_phases_are_checked(start_job, phase, message):
    with pytest.raises(ValueError, match=message):
        start_job().coordinator.run_phase(Phase("x", **phase))


def test_items_and_assignment_exclude_each_other():
    with pytest.raises(ValueError, match="kind='x'"):
        Phase("x", items=[], assignment=[])


def test_progress_reaches_the_callback_with_the_newest_of_each_rank(start_job):
    job = start_job()
    _, one, two = job.all_nodes()
    seen = []
    told = threading.Event()

    def on_progress(reports):
        seen.append({report.rank: report.data["n"] for report in reports})
        if {1: 5, 2: 7} in seen:
            told.set()

    running = job.run_phase(Phase("train"), on_progress)
    for client, value in ((one, 5), (two, 7)):
        client.next_phase()
        client.progress({"n": value})
    assert told.wait(30)
    for client in (one, two):
        client.finish()
    running.result(30)


def test_a_failing_callback_ends_the_phase(start_job):
    job = start_job()
    _, one, _ = job.all_nodes()

    def on_progress(reports):
        raise KeyError("callback")

    running = job.run_phase(Phase("train"), on_progress)
    one.next_phase()
    one.progress({})
    with pytest.raises(KeyError, match="callback"):
        running.result(30)


def test_leases_of_a_lost_worker_go_to_the_others_who_wait_for_them(start_job):
    job = start_job()
    server, one, two = job.all_nodes()
    running = job.run_phase(Phase("train", items=[{"n": 1}]))
    one.next_phase()
    held = one.lease()
    two.next_phase()
    assert two.lease(wait=False) is None
    waiting = job.pool.submit(two.lease)
    one.exited(-9)
    order = server.next_order(0)
    assert (order.kind, order.payload["rank"]) == ("fence", 1)
    assert not waiting.done(), "it is not known yet what the lost one has pushed"
    server.answer(order.number, {"position": None})
    got = waiting.result(30)
    assert got["n"] == held["n"]
    again = job.node(1, attempt="second")
    assert again.next_phase().kind == "train"
    assert two.complete(got)
    two.finish({})
    with pytest.raises(StaleNodeError):
        one.complete(held)
    assert again.lease() is None
    again.finish({"by": "second"})
    assert running.result(30)[0].data == {"by": "second"}


def test_servers_that_wait_for_orders_hear_at_once_of_a_lost_worker(start_job):
    """Also where nothing else wakes them: their poll would end after 20 s only."""
    job = start_job()
    server, one, _ = job.all_nodes()
    polling = job.pool.submit(server.next_order, 0)
    for _ in range(5):
        one.heartbeat()
    state = job.coordinator._state
    with state.nodes:
        state._lost(state.members.get(one.rank))
    order = polling.result(10)
    assert (order.kind, order.payload["rank"]) == ("fence", one.rank)
    server.answer(order.number, {"position": None})
    job.coordinator.wait_fenced(10)


def test_a_queue_that_is_left_undone_is_an_error(start_job):
    job = start_job()
    _, one, two = job.all_nodes()
    queue = WorkQueue([{"n": 1}, {"n": 2}])
    running = job.run_phase(Phase("train", items=queue))
    for client in (one, two):
        client.next_phase()
    assert one.lease() is not None
    for client in (one, two):
        client.finish()
    with pytest.raises(RuntimeError, match=r"left items undone.*pending=1, leased=1"):
        running.result(30)


def test_a_workers_traceback_and_log_reach_the_driver(start_job):
    job = start_job()
    _, one, two = job.all_nodes()
    running = job.run_phase(Phase("train"))
    one.log(["the last words"])
    try:
        raise ZeroDivisionError("in the model")
    except ZeroDivisionError as error:
        one.fail(error)
    with pytest.raises(NodeError) as caught:
        running.result(30)
    assert "worker 0 (rank 1) on host-a failed" in str(caught.value)
    assert "ZeroDivisionError: in the model" in str(caught.value)
    assert "test_a_workers_traceback_and_log_reach_the_driver" in caught.value.failures[0].traceback
    assert caught.value.failures[0].log_tail == ("the last words",)
    assert two.next_phase() is None, "the others are told to end"
    with pytest.raises(JobEndedError):
        two.servers(timeout=5)


def test_the_servers_death_is_named_first_as_the_cause(start_job):
    job = start_job(failure_grace=1.0)
    server, one, _ = job.all_nodes()
    running = job.run_phase(Phase("train"))
    one.fail(ConnectionError("no server"))
    server.exited(-11)
    with pytest.raises(NodeError, match=r"^server 0 \(rank 0\) on host-a failed") as caught:
        running.result(30)
    assert [failure.rank for failure in caught.value.failures] == [0, 1]
    assert "was killed by SIGSEGV" in str(caught.value)


def test_the_death_of_a_node_with_tables_is_named_before_the_connections_that_others_lost(start_job):
    job = start_job(num_ps=0, placement="colocated", failure_grace=1.0)
    one, other = job.all_nodes()
    running = job.run_phase(Phase("train"))
    one.fail(ConnectionLostError("no one there"))
    other.exited(-9)
    with pytest.raises(NodeError, match=r"^worker 1 \(rank 1\) on host-a failed") as caught:
        running.result(30)
    assert [failure.rank for failure in caught.value.failures] == [1, 0]


def test_silence_is_an_error_that_says_who_and_for_how_long(start_job):
    job = start_job(mode="sync", heartbeat_timeout=0.6)
    server, one, _ = job.all_nodes()
    beats = [
        Heartbeat(client, interval=0.1, timeout=30, on_stop=lambda reason: None) for client in (server, one)
    ]
    with pytest.raises(NodeError, match=r"worker 1 \(rank 2\) on host-a: no heartbeat for 0\.\d s"):
        job.coordinator.run_phase(Phase("train"))
    for beat in beats:
        beat.close()


def test_a_lost_asynchronous_worker_that_does_not_come_back_is_an_error(start_job):
    job = start_job(rejoin_timeout=0.3)
    _, one, _ = job.all_nodes()
    running = job.run_phase(Phase("train"))
    one.exited(1)
    with pytest.raises(NodeError, match="ended with exit code 1, and was not started again within 0 s"):
        running.result(30)


def test_a_lost_worker_whose_results_nobody_is_left_to_redo_is_an_error(start_job):
    """Else the phase would wait for the lost one until stall_timeout, an hour."""
    job = start_job(rejoin_timeout=0.3)
    server, one, two = job.all_nodes()
    running = job.run_phase(Phase("evaluate", items=[{"n": 1}, {"n": 2}], redo_lost=True))
    for client in (one, two):
        client.next_phase()
    held = [(client, client.lease(wait=False)) for client in (one, two)]
    for client, item in held:
        assert client.begin(item)
        assert client.complete(item)
    assert one.lease() is None
    one.finish()
    two.exited(-9)
    server.answer(server.next_order(0).number, {"position": None})
    with pytest.raises(NodeError, match=r"worker 1 \(rank 2\).*was not started again within 0 s"):
        running.result(10)


def test_a_living_worker_without_progress_is_an_error(start_job):
    job = start_job(stall_timeout=0.5)
    _, one, _ = job.all_nodes()
    running = job.run_phase(Phase("train"))
    one.next_phase()
    one.finish()
    with pytest.raises(NodeError, match=r"worker 1 \(rank 2\).*made no progress in phase 'train'"):
        running.result(30)


def test_workers_that_wait_for_each_others_items_are_an_error(start_job):
    job = start_job(stall_timeout=0.5)
    _, one, two = job.all_nodes()
    running = job.run_phase(Phase("train", items=[{"rows": 1}, {"rows": 1}]))
    for worker in (one, two):
        worker.next_phase()
        assert worker.lease(wait=False) is not None
    for worker in (one, two):
        job.pool.submit(worker.lease)
    with pytest.raises(NodeError, match=r"worker . \(rank .\).*made no progress in phase 'train'"):
        running.result(30)


def test_a_phase_can_have_a_deadline(start_job):
    job = start_job()
    _, one, _ = job.all_nodes()
    running = job.run_phase(Phase("train"), timeout=0.5)
    one.next_phase()
    one.finish()
    with pytest.raises(TimeoutError, match=r"did not end in 0.5 s. Missing: worker 1 \(rank 2\) on host-a"):
        running.result(30)


def test_nodes_that_never_register_are_named(start_job):
    job = start_job(registration_timeout=0.5)
    job.node(0)
    job.client(1)
    with pytest.raises(RegistrationError) as caught:
        job.coordinator.run_phase(Phase("train"))
    assert "worker 0 (rank 1) on host-a: claimed" in str(caught.value)
    assert "worker 1 (rank 2): never seen" in str(caught.value)
    assert "spark.driver.host" in str(caught.value)


def test_an_abort_ends_every_wait_with_its_cause(start_job):
    job = start_job()
    waiting = job.pool.submit(job.coordinator.wait_ready)
    cause = RuntimeError("the stage failed")
    job.coordinator.abort(cause)
    with pytest.raises(NodeError, match="the stage failed") as caught:
        waiting.result(30)
    assert caught.value.__cause__ is cause
    client = WorkerClient(job.coordinator.address, token=job.coordinator.token, rank=1)
    assert client.claim("late", "host-a")["status"] == "stop"
    client.close()


def test_workers_wait_for_all_servers(start_job):
    job = start_job(num_ps=2, num_workers=1)
    job.node(0)
    worker = job.node(2)
    with pytest.raises(RegistrationError, match=r"server 1 \(rank 1\): never seen"):
        worker.servers(timeout=0.2)
    waiting = job.pool.submit(worker.servers, 30)
    job.node(1)
    assert waiting.result(30) == ["host-a:1", "host-a:2"]


def test_log_lines_are_logged_with_level_and_rank(start_job, caplog):
    job = start_job()
    server = job.node(0)
    with caplog.at_level(logging.DEBUG, logger="deeprec_spark.node"):
        server.log(["WARNING some.module: careful", "printed"])
    found = [
        (record.levelname, record.getMessage(), record.rank)
        for record in caplog.records
        if hasattr(record, "rank")
    ]
    assert found == [("WARNING", "[server 0] some.module: careful", 0), ("INFO", "[server 0] printed", 0)]


def test_stop_ends_the_waits_of_nodes_and_waits_for_their_end(start_job):
    job = start_job()
    nodes = job.all_nodes()
    polls = [job.pool.submit(client.next_phase) for client in nodes]
    stopping = job.pool.submit(job.coordinator.stop, 30)
    assert [poll.result(30) for poll in polls] == [None] * 3
    assert not stopping.done()
    for client in nodes:
        client.exited(0)
    stopping.result(30)


def test_malformed_requests_are_refused_and_the_job_goes_on(start_job):
    job = start_job()
    _, one, two = job.all_nodes()
    for method, header in [
        ("claim", {"attempt": 1, "host": "a"}),
        ("log", {"lines": "text"}),
        ("progress", {"phase": 1, "data": 3}),
        ("lease", {"phase": "one"}),
        ("servers", {"timeout": "long"}),
        ("exited", {}),
    ]:
        with pytest.raises(ValueError, match="The message needs"):
            one._call(method, header)
    running = job.run_phase(Phase("train"))
    for client in (one, two):
        work(client)
    running.result(30)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({0: Answer({"position": {"phase": 1, "rows": []}}), 1: Answer({"position": None})}, "only some"),
        ({0: Answer({"position": None}), 1: Answer(error_type="TimeoutError", error="late")}, "late"),
        ({0: Answer({"position": None})}, "no answer"),
    ],
)
def test_a_lost_worker_whose_last_push_is_not_known_ends_the_nodes(answers, reason):
    """They are then started again from the last checkpoint: its rows must be neither lost nor trained twice."""
    coordinator = Coordinator(CoordinatorOptions(2, 1, token="token"))
    state = coordinator._state
    try:
        order = state.orders.issue("fence", {}, {0: 1, 1: 1}, time.monotonic())
        order.answers.update(answers)
        with state.nodes:
            assert state._positions(order, "worker 0") == []
            with pytest.raises(NodeError, match=rf"server 1 \(rank 1\).*\n.*worker 0.*{reason}"):
                state.raise_failure()
    finally:
        coordinator.stop(timeout=0)
