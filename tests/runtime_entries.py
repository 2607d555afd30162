"""Worker mains that the runtime's tests launch; nodes import them by name."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np

from deeprec_spark.embedding.optimizers import SGD
from deeprec_spark.embedding.store import PullRequest, PushRequest, SparseGradient, TableSpec, UniqueKeys
from deeprec_spark.runtime.context import WorkerContext
from deeprec_spark.runtime.worker_client import LeasedItem

logger = logging.getLogger("runtime_entries")

DIM = 4


def count_items(context: WorkerContext) -> None:
    """Adds 1 to the row of each item's key, and to the one dense parameter, for each item."""
    store, client = context.store, context.client
    store.create_tables([TableSpec("items", DIM, optimizer=SGD(learning_rate=1.0))])
    store.init_dense(np.zeros(5, np.float32), np.zeros(2, np.float32), SGD(learning_rate=1.0))
    logger.info("worker %d starts with %s", context.worker_index, context.payload.decode())
    while (task := client.next_phase()) is not None:
        done = 0
        if task.kind == "train":
            for item in client.items():
                key = np.array([item["key"]])
                store.pull(PullRequest({"items": UniqueKeys(key, np.ones(1, np.int64))}))
                gradient = SparseGradient(key, np.full((1, DIM), -1, np.float32))
                store.push(PushRequest({"items": gradient}, np.full(5, -1, np.float32), None, samples=1))
                done += 1
                client.progress({"done": done})
            client.finish({"done": done, "pid": os.getpid()})
        elif task.kind == "read":
            keys = np.array(task.payload["keys"])
            ones = np.ones(len(keys), np.int64)
            reply = store.pull(PullRequest({"items": UniqueKeys(keys, ones)}, train=False))
            dense = None if reply.dense is None else reply.dense.tolist()
            client.finish({"dense": dense, "step": reply.step}, blob=reply.rows["items"].tobytes())
        elif task.kind == "fail":
            raise ZeroDivisionError("as the test wanted")
        elif task.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            client.finish({"payload": json.dumps(dict(task.payload))}, blob=task.blob)


def count_rows(context: WorkerContext) -> None:
    """Adds 1 to row `id` of the table for each id of the items' ranges, a few in each step, between gates.

    Items are {"first", "rows"}; the payload may have `step_rows`, `pause` (seconds a step), and, by worker index,
    `slow`: how many times longer that worker's steps are. The result has for each step its number, when it began and
    when its push began.
    """
    store, client, gate, pace = context.store, context.client, context.gate, context.pace
    store.create_tables([TableSpec("rows", 1, optimizer=SGD(learning_rate=1.0))])
    store.init_dense(np.zeros(1, np.float32), np.zeros(1, np.float32), SGD(learning_rate=1.0))
    state = {"steps": 0}
    context.on_cut(lambda phase: ({"pid": os.getpid(), **state}, b""))
    nothing = threading.Event()

    def step(ids: np.ndarray, rows: dict[int, int], pause: float) -> bool:
        pace.reading()
        number = getattr(pace, "number", state["steps"])
        pace.may_begin(wait=True)
        if not gate.begin(rows):
            return False
        state["steps"] += 1
        if pace.behind:
            pace.skip()
            gate.end()
            pace.used(len(ids))
            return True
        pace.begun()
        began = time.monotonic()
        store.pull(PullRequest({"rows": UniqueKeys(ids, np.ones(len(ids), np.int64))}))
        gradient = SparseGradient(ids, np.full((len(ids), 1), -1, np.float32))
        nothing.wait(pause)
        times.append((number, began, time.monotonic()))
        store.push(
            PushRequest({"rows": gradient}, np.full(1, -1, np.float32), None, samples=max(len(ids), 1))
        )
        gate.end()
        pace.ended()
        pace.used(len(ids))
        return True

    def lease() -> LeasedItem | None:
        item = client.lease(wait=False)
        if item is None:
            pace.starving()
            item = client.lease()
        return item

    while (task := client.next_phase()) is not None:
        size, pause = task.payload.get("step_rows", 4), task.payload.get("pause", 0.0)
        pause *= task.payload.get("slow", {}).get(str(context.worker_index), 1)
        skip = task.payload.get("steps_done", 0) * size
        pace.enter()
        gate.enter(task.number, task.payload.get("steps_done", 0))
        ends: list[float] = []
        times: list[tuple[int, float, float]] = []
        going = True
        while going and (item := lease()) is not None:
            if not client.begin(item):
                continue
            done = item.done if task.dynamic else min(skip, item["rows"])
            skip -= 0 if task.dynamic else done
            while going and done < item["rows"]:
                stop = min(done + size, item["rows"])
                ids = np.arange(item["first"] + done, item["first"] + stop, dtype=np.int64)
                going, done = step(ids, {item.index: stop} if task.dynamic else {}, pause), stop
                client.progress({"pid": os.getpid(), "steps": state["steps"]})
            if going:
                client.complete(item)
                gate.forget(item.index)
                ends.append(time.monotonic())
        gate.leave()
        semi_sync = pace.leave().to_dict()
        client.finish({"pid": os.getpid(), "ends": ends, "times": times, "semi_sync": semi_sync})


def stay(context: WorkerContext) -> None:
    """Tells its process id in each phase; `hang` never ends by itself, in a child's company."""
    while (task := context.client.next_phase()) is not None:
        if task.kind == "hang":
            child = subprocess.Popen(["sleep", "600"])
            context.client.progress({"pid": os.getpid(), "child": child.pid})
            threading.Event().wait()
        context.client.finish({"pid": os.getpid()})


def fail_at_once(context: WorkerContext) -> None:
    """Raises before the first phase."""
    sys.stdout.write("a line on standard output\n")
    raise ValueError("bad model")
