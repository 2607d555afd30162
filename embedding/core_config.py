"""Options in the form that the C++ engine takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deeprec_spark.embedding._core as _core
from deeprec_spark.embedding.dense import core_optimizer
from deeprec_spark.embedding.optimizers import Optimizer
from deeprec_spark.embedding.options import (
    CacheStrategy,
    CBFFilter,
    Constant,
    CounterFilter,
    DynamicDimensionOption,
    EmbeddingVariableOption,
    FilterOption,
    GlobalStepEvict,
    Initializer,
    L2WeightEvict,
    Normal,
    ProbabilityFilter,
    StorageOption,
    StorageType,
    TimeEvict,
    TruncatedNormal,
    Uniform,
)

BUFFER_BYTES = 16 << 20
"""Memory in front of a storage type that has none of its own (SSDHASH, LEVELDB)."""


def make_core(
    name: str, option: EmbeddingVariableOption, optimizer: Optimizer, dim: int, seed: int
) -> _core.Table:
    """The engine's table; a ValueError names an option that this build or this machine cannot serve.

    A MemoryError names the option that asks for more memory than there is.
    """
    dynamic = option.dynamic_dimension or DynamicDimensionOption()
    if dim % dynamic.block_num:
        raise ValueError(
            "embedding_dim must be a multiple of block_num. "
            f"Received: embedding_dim={dim}, block_num={dynamic.block_num}"
        )
    row_bytes = 4 * dim * (1 + len(optimizer.slot_names())) + 128
    config: dict[str, Any] = {
        "name": name,
        "dim": dim,
        "bfloat16": option.value_dtype == "bfloat16",
        "initializer": _initializer(option.init_option.initializer),
        "seed": seed % 2**64,
        "admission": _admission(option.filter_option, seed),
        "no_permission": option.init_option.default_value_no_permission,
        "blocks": dynamic.block_num,
        "block_thresholds": list(dynamic.thresholds or ()),
        "block_by_rank": dynamic.by_rank,
        "block_rank_base": dynamic.rank_base,
        "block_decay": dynamic.decay,
        "tiers": _tiers(option.storage_option, row_bytes),
        "lru": option.storage_option.cache_strategy is CacheStrategy.LRU,
        **_eviction(option),
    }
    try:
        return _core.Table(core_optimizer(optimizer), config)
    except RuntimeError as error:
        if not str(error).startswith("Unable to cast"):
            raise
        raise ValueError(
            f"A number is too large for the engine. Received: embedding_dim={dim}, {option}, {optimizer}"
        ) from None
    except MemoryError as error:
        if isinstance(error, _core.StorageFullError):
            raise
        raise MemoryError(
            f"There is not enough memory for table {name!r}. Received: embedding_dim={dim}, {option}"
        ) from None


def _initializer(initializer: Initializer) -> dict[str, Any]:
    if isinstance(initializer, Constant):
        return {"kind": "Constant", "a": initializer.value, "b": 0.0}
    if isinstance(initializer, Uniform):
        return {"kind": "Uniform", "a": initializer.minval, "b": initializer.maxval}
    if isinstance(initializer, (Normal, TruncatedNormal)):
        return {"kind": type(initializer).__name__, "a": initializer.mean, "b": initializer.stddev}
    raise TypeError(f"The engine has no such initializer. Received: {initializer!r}")


def _admission(option: FilterOption | None, seed: int) -> dict[str, Any]:
    if isinstance(option, CounterFilter) and option.filter_freq > 1:
        return {"kind": "counter", "threshold": option.filter_freq}
    if isinstance(option, CBFFilter) and option.filter_freq > 1:
        return {
            "kind": "bloom",
            "threshold": option.filter_freq,
            "counters": option.num_counters,
            "hashes": option.num_hashes,
            "counter_bytes": option.counter_bytes,
        }
    if isinstance(option, ProbabilityFilter) and option.probability < 1:
        return {"kind": "probability", "probability": option.probability, "seed": seed % 2**64}
    return {"kind": "all"}


def _eviction(option: EmbeddingVariableOption) -> dict[str, Any]:
    rules: dict[str, Any] = {"steps_to_live": -1, "seconds_to_live": -1, "l2_threshold": 0.0}
    for policy in option.evict_options:
        if isinstance(policy, GlobalStepEvict) and policy.steps_to_live is not None:
            rules["steps_to_live"] = policy.steps_to_live
        if isinstance(policy, TimeEvict) and policy.seconds_to_live is not None:
            rules["seconds_to_live"] = policy.seconds_to_live
        if isinstance(policy, L2WeightEvict) and policy.l2_weight_threshold > 0:
            rules["l2_threshold"] = policy.l2_weight_threshold
    return rules


def _tiers(option: StorageOption, row_bytes: int) -> list[dict[str, Any]]:
    node = -1 if option.numa_node is None else option.numa_node
    # DRAM_PMEM takes libpmem where it is, and the kernel's own mapping of files elsewhere.
    if option.storage_type is StorageType.PMEM_LIBPMEM:
        _core.require_libpmem()
    if option.storage_type is StorageType.PMEM_MEMKIND:
        _core.require_memkind(node)
    if option.storage_path is not None:
        Path(option.storage_path).mkdir(parents=True, exist_ok=True)
    tiers: list[dict[str, Any]] = []
    for kind, limit in zip(option.storage_type.tiers, option.limits(), strict=True):
        path = option.storage_path if kind in ("PMEM_LIBPMEM", "SSDHASH", "LEVELDB") else ""
        tiers.append({"kind": kind, "bytes": limit, "path": path, "node": node})
    if tiers[0]["kind"] in ("SSDHASH", "LEVELDB"):
        tiers.insert(
            0, {"kind": "DRAM", "bytes": max(BUFFER_BYTES, 64 * row_bytes), "path": "", "node": node}
        )
    return tiers
