"""Restarts, SIGTERM, positions and plans: the parts of recovery that need no nodes."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from deeprec_spark.checkpoint import CheckpointNotFoundError
from deeprec_spark.cluster import ClusterOptions
from deeprec_spark.data import ParquetDataset, RowRange
from deeprec_spark.data.arrays import pack_arrays
from deeprec_spark.epochs import EpochPlan, RunningEpoch
from deeprec_spark.fitting import FitLoop, FitStatistics
from deeprec_spark.position import EpochPosition, FitIdentity, FitPosition, WorkerArrays
from deeprec_spark.recovery import RestartOptions, going_back, with_restarts
from deeprec_spark.runtime.cut import Cut, OpenCut, WorkerState
from deeprec_spark.runtime.errors import (
    ConnectionLostError,
    JobError,
    NodeError,
    NodeFailure,
    RegistrationError,
    RemoteError,
    SlotsError,
    TerminatedError,
    is_lasting,
)
from deeprec_spark.runtime.gate import Standing
from deeprec_spark.runtime.messages import Message
from deeprec_spark.runtime.orders import StorageError
from deeprec_spark.runtime.phases import PhaseResult
from deeprec_spark.runtime.transport import Connection, MessageServer
from deeprec_spark.saving import CheckpointOptions, Draft, Saver, Termination

QUICK = RestartOptions(max_restarts=2, backoff_secs=0.0)


def failing(*errors: Exception) -> tuple[Callable[[], None], list[int]]:
    """An attempt that fails with these errors, one after another, then succeeds; and the attempts made."""
    left, made = list(errors), []

    def attempt() -> None:
        made.append(len(made))
        if left:
            raise left.pop(0)

    return attempt, made


def run(attempt: Callable[[], None], options: RestartOptions = QUICK) -> list[Exception]:
    told: list[Exception] = []
    with_restarts(attempt, options, on_restart=told.append, interrupt=threading.Event())
    return told


def test_nodes_that_failed_are_started_again() -> None:
    first, second = NodeError("one"), NodeError("two")
    attempt, made = failing(first, second)
    assert run(attempt) == [first, second]
    assert len(made) == 3


def test_restarts_are_counted() -> None:
    attempt, made = failing(NodeError("one"), NodeError("two"), NodeError("three"))
    with pytest.raises(NodeError, match=r"(?s)three.*restarted 2 times"):
        run(attempt)
    assert len(made) == 3


def test_a_save_begins_the_count_of_restarts_anew() -> None:
    """A job of weeks goes on, however often nodes fail, as long as it comes further between failures."""
    saves, made = [0], []

    def attempt() -> None:
        made.append(len(made))
        saves[0] = min(len(made), 6)
        raise NodeError("again", [])

    told: list[JobError] = []
    with pytest.raises(NodeError, match=r"(?s)again.*restarted 2 times.*no save since"):
        with_restarts(
            attempt, QUICK, on_restart=told.append, interrupt=threading.Event(), saves=lambda: saves[0]
        )
    assert len(made) == 8, "2 without a save after the 6 that made one"


def test_what_would_fail_again_is_not_tried_again() -> None:
    lasting = NodeError("bad model", [NodeFailure(1, "worker 0", "ValueError: bad model", lasting=True)])
    for error in (lasting, ValueError("of the driver"), RegistrationError("never came up")):
        attempt, made = failing(error)
        with pytest.raises(type(error)):
            run(attempt)
        assert len(made) == 1


def test_a_restart_waits_for_slots_and_nodes() -> None:
    attempt, made = failing(NodeError("gone"), SlotsError("none yet"), SlotsError("none yet"))
    assert len(run(attempt)) == 1
    assert len(made) == 4
    with pytest.raises(SlotsError):
        run(failing(SlotsError("at the start"))[0])
    with pytest.raises(SlotsError):
        run(failing(NodeError("gone"), SlotsError("no more"))[0], replace(QUICK, slots_secs=0.0))
    attempt, _ = failing(NodeError("gone"), RegistrationError("not yet"))
    assert len(run(attempt)) == 2


def test_a_restart_whose_storage_is_away_is_tried_again() -> None:
    attempt, made = failing(NodeError("gone"), StorageError("server 0 could not restore", "OSError"))
    assert len(run(attempt)) == 2
    assert len(made) == 3
    attempt, made = failing(StorageError("at the start", "OSError"))
    with pytest.raises(StorageError):
        run(attempt)
    assert len(made) == 1


def test_a_driver_that_cannot_read_its_checkpoint_for_the_moment_tries_again() -> None:
    with pytest.raises(OSError, match="of the first attempt"), going_back(restart=False):
        raise OSError("of the first attempt")
    errors: list[Exception] = [
        NodeError("gone"),
        OSError("no answer"),
        TimeoutError("late"),
        FileNotFoundError(),
    ]

    def attempt() -> None:
        with going_back(restart=len(errors) < 4):
            raise errors.pop(0)

    told: list[Exception] = []
    with pytest.raises(FileNotFoundError):
        with_restarts(
            attempt, replace(QUICK, max_restarts=5), on_restart=told.append, interrupt=threading.Event()
        )
    assert [type(error) for error in told] == [NodeError, StorageError, StorageError]


@pytest.mark.parametrize(("restarts", "kind"), [(0, CheckpointNotFoundError), (1, StorageError)])
def test_a_fit_tells_a_checkpoint_that_it_cannot_read_now(restarts: int, kind: type[Exception]) -> None:
    """A name that the file system takes for an error, unlike one that is not there."""
    fit = FitLoop.__new__(FitLoop)
    fit._start, fit._last, fit._checkpoints = "/tmp/" + 300 * "x", None, CheckpointOptions()
    fit.statistics = FitStatistics(restarts=restarts)
    with pytest.raises(kind, match="Cannot read the checkpoint") as caught:
        fit._attempt(lambda: pytest.fail("no cluster is started"))
    assert type(caught.value) is kind


def test_a_pause_ends_when_the_driver_is_to_end() -> None:
    interrupt = threading.Event()
    interrupt.set()
    with pytest.raises(TerminatedError, match="SIGTERM"):
        with_restarts(failing(NodeError("x"))[0], RestartOptions(), on_restart=print, interrupt=interrupt)


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="max_restarts=-1"):
        RestartOptions(max_restarts=-1)
    with pytest.raises(ValueError, match="save_secs=0"):
        CheckpointOptions(save_secs=0)
    with pytest.raises(ValueError, match="keep_max=0"):
        CheckpointOptions(keep_max=0)


@pytest.mark.parametrize(
    ("error", "lasting"),
    [
        (ValueError("data"), True),
        (ArithmeticError("not finite"), True),
        (FileNotFoundError("vocabulary"), True),
        (ConnectionLostError("server"), False),
        (RemoteError("server"), False),
        (TimeoutError("sync"), False),
        (OSError("no space left"), False),
        (MemoryError(), False),
    ],
)
def test_whose_fault_an_error_is(error: Exception, lasting: bool) -> None:
    assert is_lasting(error) == lasting


def asked(termination: Termination) -> bool:
    """Whether SIGTERM is noted: by this thread, once it wakes, though the system may interrupt another one for it."""
    end = time.monotonic() + 20
    while not termination.asked.wait(0.05) and time.monotonic() < end:
        pass
    return termination.asked.is_set()


def test_sigterm_is_noted_once_and_its_handler_given_back() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        termination = Termination()
        with termination.watch():
            os.kill(os.getpid(), signal.SIGTERM)
            assert asked(termination)
            assert not seen
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [signal.SIGTERM] * 2
        with Termination().watch(False) as off:
            os.kill(os.getpid(), signal.SIGTERM)
            assert not off.asked.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_where_sigterm_cannot_be_noted_a_warning_says_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    def watched(on: bool) -> bool:
        with Termination().watch(on) as termination:
            return termination.asked.is_set()

    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1, thread_name_prefix="of-a-service") as pool:
        assert not pool.submit(watched, False).result(10)
        assert not caplog.records
        assert not pool.submit(watched, True).result(10)
    assert signal.getsignal(signal.SIGTERM) == before
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert re.search(r"main thread.*incremental_secs.*on_sigterm=False.*'of-a-service", record.getMessage())


def test_a_server_goes_on_after_sigterm_has_been_noted() -> None:
    """The nodes must be reachable for the last save."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with Termination().watch() as termination:
            server = MessageServer({"echo": lambda message: message}, host="127.0.0.1", token="secret")
            connection = Connection(server.address, token="secret")
            os.kill(os.getpid(), signal.SIGTERM)
            assert asked(termination)
            for number in range(20):
                assert connection.call("echo", Message({"number": number})).header["number"] == number
            connection.close()
            server.stop()
    finally:
        signal.signal(signal.SIGTERM, before)


PLAN = EpochPlan(
    ParquetDataset((RowRange("a", 0, 0, 0, 1000), RowRange("b", 1, 0, 0, 500)), "sizes"),
    ClusterOptions(num_ps=1, num_workers=3),
    batch_size=10,
)
IDENTITY = FitIdentity("async", 2, 0, 10, None, True, 0, 3, PLAN.fingerprint)


def test_positions_survive_json() -> None:
    import json

    position = FitPosition(
        asdict(IDENTITY),
        epoch=1,
        done_epochs=4,
        history={"loss": [0.5]},
        within=EpochPosition(
            steps=7,
            queue={"completed": [1], "done": [[0, 30]]},
            metrics=[np.array([1.5, 2.5]), np.array([3], np.int32)],
            workers=[WorkerArrays([np.array(2.0)], [np.array([5, 6], np.uint32)])],
            samples=70,
            updates=9,
        ),
        learning_rate=0.1,
        step=100,
    )
    again = FitPosition.from_dict(json.loads(json.dumps(position.to_dict())))
    assert again is not None
    assert again.to_dict() == position.to_dict()
    assert again.within is not None
    assert again.within.metrics[1].dtype == np.int32
    assert again.within.workers[0].random[0].tolist() == [5, 6]
    assert FitPosition.from_dict(None) is None
    assert FitPosition.from_dict({"version": 99}) is None


def test_what_differs_between_two_fits_is_named() -> None:
    assert IDENTITY.differences(asdict(IDENTITY)) == []
    assert IDENTITY.differences(asdict(replace(IDENTITY, epochs=3))) == ["epochs=2 instead of 3"]
    assert IDENTITY.differences(asdict(replace(IDENTITY, num_workers=8))) == []
    weighted = replace(IDENTITY, class_weight="{1: 2.0}", objective="mse")
    assert weighted.differences(asdict(replace(weighted, class_weight=""))) == [
        "class_weight='{1: 2.0}' instead of ''"
    ]
    assert weighted.differences(asdict(replace(weighted, objective="bce"))) == [
        "objective='mse' instead of 'bce'"
    ]
    of_before = {
        name: value for name, value in asdict(IDENTITY).items() if name not in ("class_weight", "objective")
    }
    assert weighted.differences(of_before) == []
    ranks = replace(IDENTITY, mode="sync")
    assert ranks.differences(asdict(replace(ranks, num_workers=8))) == ["num_workers=3 instead of 8"]


def test_a_plan_goes_on_with_the_leases_of_other_workers() -> None:
    queue = PLAN.phase("train", {}, PLAN.rows(0)).queue()
    assert queue is not None
    lease = queue.take("x")
    assert lease is not None
    position = queue.position({lease.index: 7})
    fewer = replace(PLAN, cluster=ClusterOptions(num_ps=1, num_workers=1), lease_workers=3)
    again = fewer.phase("train", {}, fewer.rows(0), position).queue()
    assert again is not None
    taken = again.take("y")
    assert taken is not None
    assert (taken.item, taken.done) == (lease.item, 7)
    assert PLAN.rows(0) != PLAN.rows(1)
    assert (
        replace(PLAN, dataset=ParquetDataset(PLAN.dataset.ranges, "others")).fingerprint != PLAN.fingerprint
    )


def cut_before_anybody_has_begun(*random: int) -> Cut:
    """SIGTERM may come between the restore of a checkpoint and the first step after it."""
    told = {
        rank: WorkerState(Standing(1), {"begun": False, "samples": 0}, pack_arrays([np.array(number)]))
        for rank, number in enumerate(random, 1)
    }
    return Cut("save", None, 1, 100, told, None)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_cut_before_the_first_step_of_a_resumed_epoch_is_where_it_was_resumed(mode: Any) -> None:
    sync = mode == "sync"
    workers = [WorkerArrays([np.array(30.0 + rank)] if sync else [], [np.array(rank)]) for rank in range(2)]
    metrics = [] if sync else [np.array(61.0)]
    before = EpochPosition(7 if sync else 0, None, metrics, workers, samples=70, updates=9)
    at = RunningEpoch(before, 100, active=True).at(
        cut_before_anybody_has_begun(8, 9), ClusterOptions(1, 2, mode)
    )
    assert at.to_dict() == before.to_dict()


def test_a_cut_before_the_only_worker_has_begun_keeps_its_metrics() -> None:
    before = EpochPosition(workers=[WorkerArrays([np.array(5.0)], [np.array(1)])], samples=5, updates=2)
    epoch, options = RunningEpoch(before, 100, active=True), ClusterOptions(1, 1)
    for cut in (cut_before_anybody_has_begun(), cut_before_anybody_has_begun(4)):
        assert epoch.at(cut, options).to_dict() == before.to_dict()


def told(metric: float, random: int, samples: int = 10) -> WorkerState:
    """A worker in the middle of its phase."""
    data = {"begun": True, "samples": samples, "metrics": 1}
    return WorkerState(Standing(1), data, pack_arrays([np.array(metric), np.array(random)]))


def numbers(arrays: Any) -> list[float]:
    return [float(array) for array in arrays]


def test_an_epoch_that_only_one_worker_goes_on_with_keeps_the_metrics_of_all_before() -> None:
    """More than once: the second save of the fit that goes on, and the end of its epoch."""
    before = EpochPosition(metrics=[np.array(100.0)], workers=[WorkerArrays(), WorkerArrays()], samples=100)
    options = ClusterOptions(1, 1)
    at = RunningEpoch(before, 0).at(Cut("save", None, 1, 7, {1: told(10.0, 1)}, None), options)
    assert (numbers(at.metrics), [numbers(worker.metrics) for worker in at.workers]) == ([100.0], [[10.0]])
    again = RunningEpoch(at, 7).at(Cut("save", None, 1, 9, {1: told(15.0, 2)}, None), options)
    assert (numbers(again.metrics), [numbers(worker.metrics) for worker in again.workers]) == (
        [100.0],
        [[15.0]],
    )
    assert again.samples == 120
    more = RunningEpoch(again, 9).at(Cut("save", None, 1, 9, {2: told(3.0, 2)}, None), ClusterOptions(1, 2))
    assert numbers(more.metrics) == [118.0], "the first worker goes on with what it had, if it begins"


def test_states_of_workers_are_by_rank_whoever_was_there() -> None:
    before = EpochPosition(workers=[WorkerArrays(random=[np.array(rank)]) for rank in range(3)])
    options = ClusterOptions(2, 4)
    at = RunningEpoch(before, 0).at(
        Cut("save", None, 1, 7, {3: told(1.0, 11), 5: told(1.0, 13)}, None), options
    )
    assert [numbers(worker.random) for worker in at.workers] == [[0], [11], [2], [13]]
    results = [
        PhaseResult(4, {"metrics": 1}, told(1.0, 12).blob),
        PhaseResult(5, {"metrics": 1}, told(1.0, 13).blob),
    ]
    after = RunningEpoch(EpochPosition(workers=before.workers[:1]), 0).after(results, options)
    assert [numbers(worker.random) for worker in after] == [[0], [], [12], [13]]


def test_a_cut_is_of_the_epoch_whose_phase_it_goes_through() -> None:
    cut = cut_before_anybody_has_begun()
    between = replace(cut, phase=0)
    assert RunningEpoch(phase=1, active=True).crossed(cut)
    assert not RunningEpoch(phase=2, active=True).crossed(between), "the next epoch waits until it is taken"
    assert not RunningEpoch(phase=2).crossed(between)
    assert not RunningEpoch(phase=2).crossed(replace(cut, phase=3)), "an evaluation after it"
    for epoch in (RunningEpoch(phase=1), RunningEpoch(phase=2, active=True)):
        with pytest.raises(RuntimeError, match=r"through a phase that is not.*Received: phase 1"):
            epoch.crossed(cut)


class Cutter:
    """Plays the nodes of a Saver."""

    def __init__(self) -> None:
        self.bases: list[str | None] = []
        self.dropped: list[str] = []

    def begin(self) -> OpenCut:
        return OpenCut(1, [])

    def take(self, base: str | None, describe: Callable[[Cut], object], opened: OpenCut | None) -> Cut:
        self.bases.append(base)
        return Cut(f"save {len(self.bases)}", base, 1, 10 * len(self.bases), {}, None, position={})

    def write(self, cut: Cut, directory: str) -> tuple[list[object], float]:
        return [], 0.5

    def drop(self, save_id: str) -> None:
        self.dropped.append(save_id)


def saver(options: CheckpointOptions, cutter: Cutter, commit: Callable[[Draft], str]) -> tuple[Saver, list]:
    saved: list = []
    made = Saver(cutter, options, describe=lambda cut: {}, commit=commit, on_saved=saved.append)  # type: ignore[arg-type]
    return made, saved


def test_rules_decide_when_and_what_is_saved() -> None:
    cutter, drafts = Cutter(), []

    def commit(draft: Draft) -> str:
        drafts.append(draft.base)
        draft.write(f"/dir/{len(drafts)}")
        return f"/dir/{len(drafts)}"

    made, saved = saver(
        CheckpointOptions(save_secs=None, save_steps=25, incremental_steps=10), cutter, commit
    )
    for step in (0, 9, 10, 15, 20, 36):
        made.tick(step)
        made.wait(10)
    # The first one has nothing to build on; a full one is due 25 steps after it.
    assert [record.kind for record in saved] == ["full", "incremental", "full"]
    assert cutter.bases == [None, "save 1", None]
    assert drafts == [None, "/dir/1", None]
    assert saved[0].write == 0.5


def test_a_save_that_fails_costs_only_itself() -> None:
    cutter, fail = Cutter(), [True]

    def commit(draft: Draft) -> str:
        if fail:
            raise OSError(28, "No space left on device")
        return "/dir"

    made, saved = saver(CheckpointOptions(save_secs=None, incremental_steps=1), cutter, commit)
    made.build_on("/before", "save 0")
    made.tick(1)
    made.wait(10)
    assert not saved
    assert cutter.dropped == ["save 1"]
    with pytest.raises(OSError, match="No space"):
        made.save()
    fail.clear()
    assert made.save("incremental").kind == "full", "what changed since the failed save is not known"
    assert cutter.bases == ["save 0", None, None]
