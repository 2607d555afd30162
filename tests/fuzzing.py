"""What fuzz tests send with, and how they judge what came of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.flight as flight

from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.runtime.calls import ERRORS
from deeprec_spark.runtime.messages import Message, decode
from tests.mutations import Mutator
from tests.raw_channel import RawChannel


class GuardedStore(LocalStore):
    """Touches no files: mutated paths must not scatter any over this machine."""

    def save(self, directory: str) -> list[Any]:
        raise FileNotFoundError(directory)

    def write_snapshot(self, save_id: str, directory: str) -> list[Any]:
        raise FileNotFoundError(directory)

    def restore(self, directory: str, *more: Any) -> None:  # type: ignore[override]  # whatever a server hands over
        raise FileNotFoundError(str(directory))


class Caller:
    """Sends raw bodies and sorts the answers."""

    def __init__(self, call: Callable[[str, bytes], Message]) -> None:
        self._call = call
        self.outcomes: Counter[str] = Counter()
        self.slowest = 0.0

    def send(self, method: str, body: bytes) -> None:
        """One call; its answer or error is counted, anything but those is raised."""
        started = time.monotonic()
        try:
            header = self._call(method, body).header
            self.outcomes[header["error"]["type"] if "error" in header else "answered"] += 1
        except (flight.FlightError, pa.ArrowException, UnicodeEncodeError) as error:
            self.outcomes[type(error).__name__] += 1
        self.slowest = max(self.slowest, time.monotonic() - started)


class FlightCaller(Caller):
    """To the coordinator."""

    def __init__(self, address: str, token: str) -> None:
        super().__init__(self._do)
        self._client = flight.FlightClient(f"grpc://{address}")
        self._options = flight.FlightCallOptions(
            timeout=10.0, headers=[(b"authorization", f"Bearer {token}".encode())]
        )

    def _do(self, method: str, body: bytes) -> Message:
        [result] = list(self._client.do_action(flight.Action(method, pa.py_buffer(body)), self._options))
        return decode(result.body)

    def close(self) -> None:
        """Close the channel."""
        self._client.close()


class ChannelCaller(Caller):
    """To a server."""

    def __init__(self, address: str, token: str) -> None:
        self._channel = RawChannel(address, token)
        super().__init__(self._channel.call)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


def storm(
    caller: FlightCaller | ChannelCaller,
    base: Sequence[tuple[str, Message]],
    marker: Path,
    check: Callable[[], None],
    messages: int,
    seed: int,
) -> None:
    """Send mutations of `base` from four threads, checking on the way that the other side still works."""
    process = psutil.Process()
    before = process.memory_info().rss
    mutators = [Mutator(1000 * seed + number, base, marker) for number in range(4)]
    rounds = 5
    share = messages // len(mutators) // rounds

    def send(mutator: Mutator) -> None:
        for _ in range(share):
            caller.send(*mutator.next())

    for _ in range(rounds):
        with ThreadPoolExecutor(len(mutators)) as pool:
            list(pool.map(send, mutators, timeout=120))
        check()
    caller.close()
    grown = process.memory_info().rss - before
    assert sum(caller.outcomes.values()) == messages
    assert grown < 300 << 20, f"{grown >> 20} MiB more memory"
    assert caller.slowest < 10.0
    assert not marker.exists()
    # Anything else would be a handler's surprise. The RuntimeError is that of a second snapshot at a time.
    expected = {
        "answered",
        *ERRORS,
        "UnicodeEncodeError",
        "ArrowInvalid",
        "FlightServerError",
        "RuntimeError",
    }
    assert set(caller.outcomes) <= expected, caller.outcomes
