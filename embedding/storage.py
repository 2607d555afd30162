"""Where the rows of embedding variables live; `options` exports it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum

from deeprec_spark.embedding._serial import Serializable, integer, member, normalize, require


class StorageType(str, Enum):
    """Where rows live, first tier first."""

    DRAM = "DRAM"
    PMEM_LIBPMEM = "PMEM_LIBPMEM"  # a file: on a DAX mount, or in any directory; by libpmem
    PMEM_MEMKIND = "PMEM_MEMKIND"  # a NUMA node: KMEM-DAX persistent memory, CXL memory; by memkind
    SSDHASH = "SSDHASH"
    LEVELDB = "LEVELDB"
    DRAM_PMEM = "DRAM_PMEM"
    DRAM_SSDHASH = "DRAM_SSDHASH"
    DRAM_LEVELDB = "DRAM_LEVELDB"
    DRAM_PMEM_SSDHASH = "DRAM_PMEM_SSDHASH"
    HBM = "HBM"
    HBM_DRAM = "HBM_DRAM"
    HBM_DRAM_SSDHASH = "HBM_DRAM_SSDHASH"

    @property
    def tiers(self) -> tuple[str, ...]:
        """The kinds of the tiers, first tier first."""
        names = self.value.split("_") if self.value.startswith(("DRAM", "HBM")) else [self.value]
        return tuple("PMEM_LIBPMEM" if name == "PMEM" else name for name in names)


class CacheStrategy(str, Enum):
    """Which rows stay in the first tier."""

    LFU = "LFU"
    LRU = "LRU"


@dataclass(frozen=True)
class StorageOption(Serializable):
    """The storage of a table's rows.

    Everything is computed on rows of the first tier. Rows that it has no room for move down, the least frequent (LFU)
    or the least recently used (LRU) first; a hit in a lower tier moves a row up again.

    Args:
        storage_type: the tiers.
        storage_path: directory of files; needed by PMEM_LIBPMEM, SSDHASH and LEVELDB tiers, made if absent. The files
            live as long as the process: what must survive is in checkpoints.
        storage_size: bytes that each tier may take for rows, hard limits; the index is not counted. Tiers without a
            number: 1 GiB, and the last one without limit. LevelDB's are those of its files; live rows can fill a little
            less than half of them.
        cache_strategy: LFU or LRU.
        numa_node: for PMEM_MEMKIND; None takes all nodes that memkind knows as persistent memory: those of the
            environment's MEMKIND_DAX_KMEM_NODES, or those that it finds by itself.
    """

    storage_type: StorageType = StorageType.DRAM
    storage_path: str | None = None
    storage_size: tuple[int, ...] = ()
    cache_strategy: CacheStrategy = CacheStrategy.LFU
    numa_node: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "storage_type", member(StorageType, "storage_type", self.storage_type))
        object.__setattr__(
            self, "cache_strategy", member(CacheStrategy, "cache_strategy", self.cache_strategy)
        )
        size: object = self.storage_size
        sizes = size if isinstance(size, (list, tuple)) else (size,)
        object.__setattr__(
            self, "storage_size", tuple(integer("storage_size", one, 1, 2**63) for one in sizes)
        )
        path: object = self.storage_path
        require(
            path is None or isinstance(path, (str, os.PathLike)),
            "storage_path must be a path.",
            storage_path=path,
        )
        if path is not None:
            object.__setattr__(self, "storage_path", os.fspath(self.storage_path or ""))
        normalize(self, integers=("numa_node",))
        require(
            self.numa_node is None or "PMEM_MEMKIND" in self.storage_type.tiers,
            "numa_node has a meaning only for PMEM_MEMKIND.",
            storage_type=self.storage_type.value,
            numa_node=self.numa_node,
        )
        require(
            self.numa_node is None or 0 <= self.numa_node < 2**31,
            "numa_node must be None or a number of the system.",
            numa_node=self.numa_node,
        )
        require(
            "HBM" not in self.storage_type.tiers,
            "HBM tiers need a GPU and an engine built for it, which this one is not; take DRAM.",
            storage_type=self.storage_type.value,
        )
        needs_path = {"PMEM_LIBPMEM", "SSDHASH", "LEVELDB"} & set(self.storage_type.tiers)
        require(
            bool(self.storage_path) or not needs_path,
            f"storage_type {self.storage_type.value} needs storage_path, a directory.",
            storage_path=self.storage_path,
        )
        require(
            self.storage_path is None or bool(needs_path),
            "storage_path has no meaning for a storage_type without files.",
            storage_type=self.storage_type.value,
            storage_path=self.storage_path,
        )
        require(
            len(self.storage_size) <= len(self.storage_type.tiers),
            f"storage_size must have one number of bytes for each of the tiers {self.storage_type.tiers}.",
            storage_size=self.storage_size,
        )

    def limits(self) -> tuple[int, ...]:
        """Bytes of each tier; 0 is no limit."""
        count = len(self.storage_type.tiers)
        defaults = (1 << 30,) * (count - 1) + (0,)
        return tuple(self.storage_size) + defaults[len(self.storage_size) :]
