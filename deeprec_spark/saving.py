"""When a fit is saved, and how: options, and the thread that writes while training goes on."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

from deeprec_spark.embedding.filesystem import redacted
from deeprec_spark.embedding.store import CheckpointFile
from deeprec_spark.runtime.cut import Cut, Cutter, OpenCut
from deeprec_spark.runtime.errors import NodeError

logger = logging.getLogger(__name__)

_JOIN_SECONDS = 6 * 3600.0


@dataclass(frozen=True)
class CheckpointOptions:
    """When a fit writes checkpoints, beside the full one at its end. None switches a rule off.

    A save holds training only while the tables are fixed, not while they are written. An incremental one holds what
    changed since the save before it, and dense parameters whole.

    Args:
        save_secs, save_steps: a full checkpoint after so many seconds, or updates of the model.
        incremental_secs, incremental_steps: an incremental one.
        keep_max: how many full checkpoints stay, each with the incremental ones that build on it.
        on_sigterm: when the driver gets SIGTERM, save, then end with a TerminatedError; in the main thread only.
        fallback: where the newest checkpoint is damaged, begin with the last one that is whole, and say so; else it is
            an error. A restart after a failure always does so.
        changed_options: go on though the filter or eviction of a table is another one than its checkpoint's; else that
            is an error.
        resume: go on in the middle of a fit that was cut short, if `fit` is called with the same data and arguments.
    """

    save_secs: float | None = 1800.0
    save_steps: int | None = None
    incremental_secs: float | None = None
    incremental_steps: int | None = None
    keep_max: int = 2
    on_sigterm: bool = True
    fallback: bool = False
    changed_options: bool = False
    resume: bool = True

    def __post_init__(self) -> None:
        for name in ("save_secs", "save_steps", "incremental_secs", "incremental_steps"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be None or above 0. Received: {name}={value}")
        if self.keep_max < 1:
            raise ValueError(f"keep_max must be at least 1. Received: keep_max={self.keep_max}")


@dataclass(frozen=True)
class SaveRecord:
    """One save: where it is, and what it cost. `pause`: seconds that workers were held; `write`: of the writing."""

    directory: str
    save_id: str
    kind: Literal["full", "incremental"]
    step: int
    pause: float
    write: float
    num_bytes: int


Writer = Callable[[str], list[CheckpointFile]]


@dataclass
class Draft:
    """What a checkpoint is made of, while it is made.

    `position` is the data position as JSON; `base` the directory that the tables build on; calling `write` with a
    directory writes the files there. `write_seconds` and `num_bytes` are known afterwards.
    """

    cut: Cut
    position: Mapping[str, Any]
    base: str | None
    write: Writer
    write_seconds: float = 0.0
    num_bytes: int = 0


class Saver:
    """Saves the job of one cluster: now and then from a thread of its own, or at once.

    Args:
        cutter: of the running cluster.
        options: when to save.
        describe: gives the data position at a cut; called while workers are held.
        commit: makes the checkpoint of a draft, calling its `write`; returns its directory.
        on_saved: told of each save, in the thread that made it.
    """

    def __init__(
        self,
        cutter: Cutter,
        options: CheckpointOptions,
        *,
        describe: Callable[[Cut], Mapping[str, Any]],
        commit: Callable[[Draft], str],
        on_saved: Callable[[SaveRecord], None],
    ) -> None:
        self._cutter = cutter
        self._options = options
        self._describe = describe
        self._commit = commit
        self._on_saved = on_saved
        # Directory and id of the save that the next incremental one builds on.
        self._base: tuple[str, str] | None = None
        self._thread: threading.Thread | None = None
        # (seconds, step) of the last save of each kind; a full one counts as an incremental one, too.
        self._full_at = self._any_at = (time.monotonic(), 0)

    def start_at(self, step: int) -> None:
        """Training goes on from this step: rules count from here."""
        self._full_at = self._any_at = (time.monotonic(), step)

    def build_on(self, directory: str, save_id: str) -> None:
        """The nodes have read this checkpoint: the next incremental one may build on it."""
        self._base = (directory, save_id)

    def tick(self, step: int) -> None:
        """Start a save in the background if a rule asks for one and none is running; called often.

        The cut begins here, in the thread that runs the phases: the running one does not end before it is taken.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        kind = self._due(step)
        if kind is None:
            return
        self._mark(kind, step)
        opened = self._cutter.begin()
        thread = threading.Thread(target=self._save_quietly, args=(kind, opened), name="saver", daemon=True)
        try:
            thread.start()
        except BaseException:
            self._cutter.give_up()
            raise
        self._thread = thread

    def save(
        self, kind: Literal["full", "incremental"] = "full", commit: Callable[[Draft], str] | None = None
    ) -> SaveRecord:
        """Save now, after the running save if there is one; `commit` puts it somewhere else than those of the rules.

        Raises:
            NodeError: a node failed.
            OrderError, OSError: it could not be written.
        """
        self.wait()
        if commit is None:
            return self._save(kind)
        # Its folder is not where incremental ones may build on it.
        return self._write("full", commit)

    def wait(self, timeout: float = _JOIN_SECONDS) -> None:
        """Wait for the running save, if there is one.

        Raises:
            TimeoutError: it still runs.
        """
        if self._thread is None:
            return
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"The running save did not end within {timeout:.0f} s.")

    def settle(self, timeout: float = 60.0) -> None:
        """The job ends or has failed: wait for what the running save still does, and say so if it does not end."""
        try:
            self.wait(timeout)
        except TimeoutError as error:
            logger.warning("%s", error)

    def _due(self, step: int) -> Literal["full", "incremental"] | None:
        options, now = self._options, time.monotonic()
        if _passed(self._full_at, now, step, options.save_secs, options.save_steps):
            return "full"
        if _passed(self._any_at, now, step, options.incremental_secs, options.incremental_steps):
            return "incremental"
        return None

    def _mark(self, kind: str, step: int) -> None:
        self._any_at = (time.monotonic(), step)
        if kind == "full":
            self._full_at = self._any_at

    def _save_quietly(self, kind: Literal["full", "incremental"], opened: OpenCut) -> None:
        try:
            self._save(kind, opened)
        except NodeError as error:
            # The thread that runs the phase meets the same failure, and decides.
            logger.warning("A save was given up: %s", error)
        except Exception:
            # Training is worth more than one checkpoint: the next one may succeed.
            logger.exception("A checkpoint could not be written; training goes on")

    def _save(self, kind: Literal["full", "incremental"], opened: OpenCut | None = None) -> SaveRecord:
        record = self._write(kind, self._commit, opened)
        self._base = (record.directory, record.save_id)
        self._mark(record.kind, record.step)
        self._on_saved(record)
        return record

    def _write(
        self,
        kind: Literal["full", "incremental"],
        commit: Callable[[Draft], str],
        opened: OpenCut | None = None,
    ) -> SaveRecord:
        last = self._base if kind == "incremental" else None
        # Whatever happens, the tables no longer know the last save as their base.
        self._base = None
        cut = self._cutter.take(None if last is None else last[1], self._describe, opened)
        base = last[0] if last is not None and cut.base is not None else None

        def write(directory: str) -> list[CheckpointFile]:
            files, draft.write_seconds = self._cutter.write(cut, directory)
            draft.num_bytes = sum(file.num_bytes for file in files)
            return files

        draft = Draft(cut, cut.position, base, write)
        try:
            directory = commit(draft)
        except BaseException:
            self._cutter.drop(cut.save_id)
            raise
        record = SaveRecord(
            directory,
            cut.save_id,
            "full" if base is None else "incremental",
            cut.step,
            cut.pause,
            draft.write_seconds,
            draft.num_bytes,
        )
        logger.info(
            "Saved step %d (%s, %.1f MB): training was held for %.3f s, writing took %.2f s: %s",
            record.step, record.kind, record.num_bytes / 1e6, record.pause, record.write,
            redacted(directory),
        )  # fmt: skip
        return record


class Termination:
    """Whether SIGTERM has come, while the context of `watch` is open in the main thread: only that one can take it."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    @contextmanager
    def watch(self, on: bool = True) -> Iterator[Termination]:
        """Note SIGTERM instead of ending; the second one, and those after the context, do what they did before."""
        if not on:
            yield self
            return
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "SIGTERM would end this process without a save: Python lets only the main thread take signals. Call "
                "fit there, or bound what is lost by CheckpointOptions(incremental_secs=…); on_sigterm=False says that "
                "this is known. Received: fit in thread %r",
                threading.current_thread().name,
            )
            yield self
            return
        previous = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL

        def note(number: int, frame: FrameType | None) -> None:
            self.asked.set()
            signal.signal(signal.SIGTERM, previous)

        signal.signal(signal.SIGTERM, note)
        try:
            yield self
        finally:
            signal.signal(signal.SIGTERM, previous)


def _passed(
    since: tuple[float, int], now: float, step: int, seconds: float | None, steps: int | None
) -> bool:
    """Whether enough time or steps lie behind, and at least one step."""
    if step <= since[1]:
        return False
    return (seconds is not None and now - since[0] >= seconds) or (
        steps is not None and step - since[1] >= steps
    )


__all__ = ["CheckpointOptions", "Draft", "SaveRecord", "Saver", "Termination"]
