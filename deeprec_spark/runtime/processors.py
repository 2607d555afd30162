"""Which CPUs a node computes on, with how many threads.

The driver says how many cores an executor has, how many nodes share them, and how many are one node's (core_share.py);
the node finds out what it may really use (affinity, cgroup) and acts on the policy before anything starts a thread:

    default    up to as many threads as its executor has cores, if it may use so many CPUs: twice its part of them where
               several nodes share them; the system places them
    pinned     CPUs of its own, and as many threads; no other pinned node of the host has them, as far as nodes see each
               other: see `_claim`
    inline     as by default, but operations of a step run one after the other in the thread that computes it; each
               may still use all threads
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import pyarrow as pa

logger = logging.getLogger(__name__)

ExecutorPolicy = Literal["default", "pinned", "inline"]
POLICY = "DEEPREC_EXECUTOR_POLICY"
CORES = "DEEPREC_NODE_CORES"
EXECUTOR_CORES = "DEEPREC_EXECUTOR_CORES"
EXECUTOR_NODES = "DEEPREC_EXECUTOR_NODES"
ENGINE_THREADS = "DEEPREC_NUM_THREADS"

CPU_LOCKS = "DEEPREC_CPU_LOCKS"

_CGROUP = Path("/sys/fs/cgroup")
_NAMESPACES = Path("/proc/self/ns")
# The kernel's number (PROC_PID_INIT_INO) of the first namespace of processes, that of the host.
_HOST_PROCESSES = "pid:[4026531836]"


@dataclass(frozen=True)
class Processors:
    """What a node computes with: its threads, its part of the cores, and its own CPUs where it is pinned."""

    policy: ExecutorPolicy
    threads: int
    part: int
    cpus: tuple[int, ...] = ()


def check_policy(policy: str) -> None:
    """ValueError unless there is such a policy."""
    if policy not in get_args(ExecutorPolicy):
        known = ", ".join(map(repr, get_args(ExecutorPolicy)))
        raise ValueError(f"executor_policy must be one of {known}. Received: executor_policy={policy!r}")


def node_environment(
    policy: ExecutorPolicy, cores: int, executor: int | None = None, nodes: int = 1
) -> dict[str, str]:
    """What the driver tells its nodes, as environment variables.

    Arguments:
        cores: those of one node.
        executor: all of its executor, where they are known.
        nodes: how many nodes share them.
    """
    known = {} if executor is None else {EXECUTOR_CORES: str(executor)}
    return {POLICY: policy, CORES: str(cores), EXECUTOR_NODES: str(nodes), **known}


def shared_threads(cores: int, nodes: int) -> int:
    """Threads of one of several nodes that share cores, none of which is its own.

    Twice its part, since servers and workers wait for each other in turn, and two at least, so that a node reads ahead
    while it computes; never more than there are cores.

    Example:
        >>> shared_threads(2, 2), shared_threads(2, 4), shared_threads(16, 8)
        (2, 2, 4)
    """
    return min(cores, max(2, 2 * cores // nodes))


def allowed_cpus() -> list[int]:
    """The CPUs that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def cgroup_cpus(root: Path = _CGROUP) -> float | None:
    """How many CPUs' time the cgroup grants (version 2, then 1), as containers are limited; None without a limit."""
    quota = period = None
    try:
        quota, period = (root / "cpu.max").read_text().split()[:2]
    except (OSError, ValueError):
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if quota == "max" or int(quota) <= 0:
        return None
    return int(quota) / int(period)


def usable_cpus() -> int:
    """How many threads can run at once: CPUs of the affinity, or fewer where the cgroup grants less time."""
    granted = cgroup_cpus()
    count = len(allowed_cpus())
    return count if granted is None else max(1, min(count, math.ceil(granted)))


def configure(environment: Mapping[str, str] | None = None) -> Processors:
    """Act on what the driver said; call it before any library starts its threads.

    Sets the affinity of this process (pinned), and the threads of the engine and of Arrow (those that compute; the ones
    that wait for files stay as they are). TensorFlow's are the worker's own matter.
    """
    global _current
    environment = os.environ if environment is None else environment
    policy: ExecutorPolicy = environment.get(POLICY, "default")  # type: ignore[assignment]  # checked next
    check_policy(policy)
    if policy == "pinned":
        cpus = _claim(int(environment.get(CORES, "1")))
        if cpus:
            os.sched_setaffinity(0, cpus)
            chosen = Processors(policy, len(cpus), len(cpus), tuple(cpus))
        else:
            logger.warning(
                "Not pinned: other nodes, of this job or another, have all CPUs that this one may use, %s",
                allowed_cpus(),
            )
            threads = max(1, min(int(environment.get(CORES, "1")), usable_cpus()))
            chosen = Processors(policy, threads, threads)
    else:
        cores = min(usable_cpus(), int(environment.get(EXECUTOR_CORES, usable_cpus())))
        nodes = int(environment.get(EXECUTOR_NODES, "1"))
        chosen = Processors(policy, shared_threads(cores, nodes), max(1, cores // nodes))
    os.environ.setdefault(ENGINE_THREADS, str(chosen.threads))
    # Spark tells Python workers OMP_NUM_THREADS=spark.task.cpus, which Arrow goes by: one thread to decode Parquet.
    pa.set_cpu_count(chosen.threads)
    where = f" on CPUs {','.join(map(str, chosen.cpus))}" if chosen.cpus else ""
    logger.info("Executor policy %s: %d threads%s", policy, chosen.threads, where)
    _current = chosen
    return chosen


_current: Processors | None = None


def current() -> Processors:
    """What `configure` chose for this process; where it was not called, all that it may use."""
    return _current or Processors("default", usable_cpus(), usable_cpus())


def container_without_cpus(namespaces: Path = _NAMESPACES) -> bool:
    """Whether this is a container (processes of its own) that may run on all CPUs of the host, as others may, too."""
    try:
        inside = os.readlink(namespaces / "pid") != _HOST_PROCESSES
    except OSError:
        return False
    return inside and len(allowed_cpus()) == os.cpu_count()


# Open as long as this process lives: the system frees names and locks at its end, however it ends.
_held: list[socket.socket | int] = []


def _claim(count: int) -> list[int]:
    """Up to `count` CPUs that no other pinned process has, of those that this one can know of.

    For each CPU stands a name (abstract Unix socket), which all processes of the host's network see whatever their user
    and files, and a locked file, which all see that share the folder. `CPU_LOCKS` names a folder that is shared by
    more than the network is, as by all pods of a host; then it alone counts.
    """
    told = os.environ.get(CPU_LOCKS)
    folder = Path(told or Path(tempfile.gettempdir()) / f"deeprec-spark-cpus-{os.getuid()}")
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    found: list[int] = []
    for cpu in allowed_cpus():
        if len(found) == count:
            break
        name = None if told else _take_name(cpu)
        if name is None and not told:
            continue
        lock = _take_lock(folder / str(cpu))
        if lock is None:
            if name is not None:
                name.close()
            continue
        _held.extend(held for held in (name, lock) if held is not None)
        found.append(cpu)
    if found and not told and container_without_cpus():
        logger.warning(
            "Pinned to CPUs %s in a container that has no CPUs of its own (cpuset): another container of this host may "
            "have taken the same, unless they share its network or the folder of temporary files. Give containers "
            "CPUs (on Kubernetes the static CPU manager policy), or set spark.executorEnv.%s to a folder of the host "
            "that is mounted in all of them, or executor_policy to 'default'. Received: executor_policy='pinned'",
            ",".join(map(str, found)),
            CPU_LOCKS,
        )
    return found


def _take_name(cpu: int) -> socket.socket | None:
    """The socket whose name stands for a CPU; None where another process has it."""
    name = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        name.bind(f"\0deeprec-spark-cpu-{cpu}")
    except OSError as error:
        name.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return None
    return name


def _take_lock(path: Path) -> int | None:
    """The locked file that stands for a CPU; None where another process has it."""
    lock = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
