"""A driver's coordinator in a process of its own, for nodes that other processes play: see `benchmarks.peers.players`.

start      python -m benchmarks.peers.driver '{"servers": 8, "workers": 192}'
answer     {"ready": true, "address": "…", "token": "…", "memory": 61000000, …}
request    {"op": "wait"} | {"op": "phase", "items": 4000} | {"op": "usage"}
answer     {"seconds": 1.2, "memory": 73000000, "threads": 410, "processor": 3.1}
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import psutil

from benchmarks.peers.protocol import answer, settings
from deeprec_spark.runtime.coordinator import Coordinator
from deeprec_spark.runtime.options import CoordinatorOptions
from deeprec_spark.runtime.phases import Phase


def usage() -> dict[str, Any]:
    """Memory in bytes, threads, and processor seconds of this process so far."""
    process = psutil.Process()
    times = process.cpu_times()
    return {
        "memory": process.memory_info().rss,
        "threads": process.num_threads(),
        "processor": times.user + times.system,
    }


def main() -> None:
    """Serve requests until standard input closes."""
    options = settings()
    topology = CoordinatorOptions(num_ps=options["servers"], num_workers=options["workers"])
    with Coordinator(topology) as coordinator:
        answer({"ready": True, "address": coordinator.address, "token": coordinator.token, **usage()})
        for line in sys.stdin:
            request = json.loads(line)
            start = time.perf_counter()
            if request["op"] == "wait":
                coordinator.wait_ready()
            elif request["op"] == "phase":
                items = [{"number": number} for number in range(request["items"])]
                coordinator.run_phase(Phase("train", items=items), timeout=300)
            answer({"seconds": time.perf_counter() - start, **usage()})


if __name__ == "__main__":
    main()
