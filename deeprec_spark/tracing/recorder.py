"""FitRecorder: asks the nodes of a fit what they have done, and writes what comes back."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from deeprec_spark.embedding.filesystem import join, redacted
from deeprec_spark.runtime.errors import JobError
from deeprec_spark.runtime.orders import Answer
from deeprec_spark.runtime.phases import PhaseResult, Progress
from deeprec_spark.tracing.chrome import JobTrace
from deeprec_spark.tracing.observer import FitObserver
from deeprec_spark.tracing.options import TracingOptions
from deeprec_spark.tracing.output import OutputFolder
from deeprec_spark.tracing.page import render
from deeprec_spark.tracing.report import WorkerReport
from deeprec_spark.tracing.scalars import call_scalars, shard_scalars, worker_scalars
from deeprec_spark.tracing.spans import decode_spans

if TYPE_CHECKING:
    from deeprec_spark.tracing.board import ScalarBoard

logger = logging.getLogger(__name__)

Ask = Callable[[Mapping[str, Any], bool], Mapping[int, Answer]]
"""The order `observe` to nodes: its payload, and whether to all of them or to those with tables only."""

TRACE_FILE, PAGE_FILE, DATA_FILE = "trace.json", "report.html", "report.json"


class FitRecorder:
    """A fit's observer together with what is written of it; a context that ends with the fit.

    Args:
        observer: adds up what nodes tell.
        options: what to write; None writes nothing, and asks nodes at the end of epochs only.
        model_dir: where the folder is, if the options name none.
        num_ps, num_workers: of the job.
        log: log the report at the end.
    """

    def __init__(
        self,
        observer: FitObserver,
        options: TracingOptions | None,
        model_dir: str,
        num_ps: int,
        num_workers: int,
        *,
        log: bool = True,
    ) -> None:
        self.observer = observer
        self._options = options
        self._log = log
        self._output: OutputFolder | None = None
        self._board: ScalarBoard | None = None
        self._trace: JobTrace | None = None
        self._ask: Ask | None = None
        if options is not None:
            self._output = OutputFolder(options.log_dir or join(model_dir, "tracing"))
            if options.tensorboard:
                from deeprec_spark.tracing.board import ScalarBoard  # TensorFlow, which options do without

                self._board = ScalarBoard(self._output.local)
            if options.trace_steps:
                self._trace = JobTrace(num_ps, num_workers, options.trace_steps, options.sample_every)
        self._asked = self._epoch_started = time.monotonic()
        self._workers: dict[int, WorkerReport] = {}
        self._shards: dict[tuple[int, str], int] = {}
        self._calls: dict[int, Mapping[str, Sequence[float]]] = {}
        self._unanswered = 0

    def __enter__(self) -> FitRecorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the report and the trace, also of a fit that failed."""
        report = self.observer.report()
        if self._log and error is None:
            logger.info("Where the time went:\n%s", report)
        if self._output is None:
            return
        with _harmless(), ExitStack() as closing:
            closing.callback(self._output.close)
            if self._board is not None:
                closing.callback(self._board.close)
            (self._output.local / PAGE_FILE).write_text(render(report), encoding="utf-8")
            (self._output.local / DATA_FILE).write_text(
                json.dumps(report.to_dict(), indent=1), encoding="utf-8"
            )
            if self._trace is not None:
                self._trace.write(self._output.local / TRACE_FILE)
            closing.close()
            logger.info("Report, trace and TensorBoard logs: %s", redacted(self._output.location))

    def nodes_started(self, ask: Ask) -> None:
        """Nodes run that were not asked before; `ask` reaches them."""
        self.observer.nodes_started()
        self._calls.clear()
        self._ask = ask
        if self._trace is not None:
            # Their spans begin now.
            self._answers(everyone=True)

    def tick(self, step: int) -> None:
        """Now and then: ask the nodes and write scalars, if it is time to."""
        if self._options is not None and time.monotonic() - self._asked >= self._options.interval_secs:
            self.ask(step)

    def epoch_begin(self) -> None:
        """The workers begin an epoch."""
        self._epoch_started = time.monotonic()

    def epoch_end(self, epoch: int, step: int, results: Sequence[Progress | PhaseResult]) -> None:
        """All workers have ended an epoch."""
        self.observer.workers(results)
        self.observer.epoch_end()
        now = time.monotonic()
        self.span("epoch", now - self._epoch_started, epoch + 1)
        self.ask(step)
        if self._board is not None and self._output is not None:
            with _harmless():
                self._board.flush()
                self._output.publish()

    def span(self, name: str, seconds: float, number: int = 1) -> None:
        """Something that the driver has just done."""
        if self._trace is not None:
            self._trace.driver(name, time.monotonic() - seconds, seconds, number)

    def ask(self, step: int) -> None:
        """Ask the nodes, and write what they tell as scalars of this step of the model."""
        before, self._asked = self._asked, time.monotonic()
        answers = self._answers(everyone=self._trace is not None)
        if self._board is not None:
            with _harmless():
                self._write_scalars(self._board, step, self._asked - before, answers)

    def _answers(self, *, everyone: bool) -> Mapping[int, Answer]:
        if self._ask is None:
            return {}
        bounds = None if self._trace is None else self._trace.bounds
        trace = None if bounds is None else {"capacity": bounds.capacity, "sample_every": bounds.sample_every}
        try:
            answers = self._ask({"trace": trace}, everyone)
        except JobError as error:
            # If a node has failed, whoever trains on it hears so; if it is only too busy to answer, nothing is wrong.
            self._unanswered += 1
            logger.warning(
                "What the nodes tell of themselves has not come (%d times so far); the fit goes on: %s",
                self._unanswered,
                error,
            )
            return {}
        for rank, answer in answers.items():
            if "tables" in answer.data:
                self.observer.server(rank, answer.data["tables"])
            if self._trace is not None and answer.blob:
                spans = decode_spans(answer.blob)
                self._trace.add(rank, spans, answer.data["offset"], answer.data["uncertainty"])
        return answers

    def _write_scalars(
        self, board: ScalarBoard, step: int, seconds: float, answers: Mapping[int, Answer]
    ) -> None:
        report = self.observer.report()
        for worker in report.workers:
            board.write(
                f"worker {worker.worker}", step, worker_scalars(worker, self._workers.get(worker.worker))
            )
        self._workers = {worker.worker: worker for worker in report.workers}
        for shard in report.shards:
            before = self._shards.get((shard.server, shard.table), 0)
            board.write(f"server {shard.server}", step, shard_scalars(shard, before, seconds))
        self._shards = {(shard.server, shard.table): shard.keys for shard in report.shards}
        for rank, answer in answers.items():
            calls = answer.data.get("calls", {})
            if calls:
                board.write(f"server {rank}", step, call_scalars(calls, self._calls.get(rank, {}), seconds))
                self._calls[rank] = calls


@contextmanager
def _harmless() -> Iterator[None]:
    """A full disk or a lost store must not end hours of training because of what only tells of it."""
    try:
        yield
    except OSError as error:
        logger.warning("What this fit tells of itself cannot be written; it goes on: %s", error)
