"""Warm starts: a part of another checkpoint's tables and weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.optimizers import Adagrad, Adam, Optimizer
from deeprec_spark.embedding.options import EmbeddingVariableOption
from deeprec_spark.embedding.store import (
    PullRequest,
    PushRequest,
    SaveBaseError,
    SparseGradient,
    TableSpec,
    UniqueKeys,
)
from deeprec_spark.embedding.variable import NEVER_UPDATED
from deeprec_spark.embedding.warm_start import WarmStart

KEYS = np.array([1, -2, 1 << 40])
OLD = [TableSpec("user", 3, optimizer=Adam(0.1)), TableSpec("item", 2, optimizer=Adam(0.1))]


def store(specs: list[TableSpec], dense: int = 4, optimizer: Optimizer | None = None) -> LocalStore:
    """A store of these tables, dense weights all 0."""
    made = LocalStore()
    made.create_tables(specs)
    made.init_dense(np.zeros(dense, np.float32), np.zeros(1, np.float32), optimizer or Adam(0.01))
    return made


@pytest.fixture
def saved(tmp_path: Path) -> tuple[LocalStore, list[str]]:
    """A trained store and its checkpoint: a full one and a delta."""
    trained = store(OLD)
    chain = []
    for number, base in enumerate((None, "0")):
        unique = UniqueKeys(KEYS, np.full(3, 2, np.int64))
        trained.pull(PullRequest({"user": unique, "item": unique}))
        gradients = {
            spec.name: SparseGradient(KEYS, np.ones((3, spec.embedding_dim), np.float32)) for spec in OLD
        }
        trained.push(PushRequest(gradients, np.ones(4, np.float32), np.ones(1, np.float32), samples=1))
        trained.snapshot(str(number), base)
        chain.append(str(tmp_path / str(number)))
        trained.write_snapshot(str(number), chain[-1])
    return trained, chain


def start(fresh: LocalStore, chain: list[str], **options: object) -> LocalStore:
    """Begin with the checkpoint."""
    fresh.restore(chain, "1", WarmStart(chain[-1], **options))  # type: ignore[arg-type]  # the test's own
    assert fresh.step == 0
    with pytest.raises(SaveBaseError):
        fresh.snapshot("next", "1")
    return fresh


def test_everything_but_the_steps(saved: tuple[LocalStore, list[str]]) -> None:
    trained, chain = saved
    fresh = start(store(OLD), chain)
    [block], [theirs] = fresh.table("user").export(), trained.table("user").export()
    assert (block.version == NEVER_UPDATED).all()
    np.testing.assert_array_equal(block.frequency, theirs.frequency)
    for name, slot in theirs.slots.items():
        np.testing.assert_array_equal(block.slots[name], slot)
    np.testing.assert_array_equal(block.value, theirs.value)
    assert fresh.table("user").core.updates == 2
    ours, old = (one.pull(PullRequest({}, train=False)) for one in (fresh, trained))
    np.testing.assert_array_equal(ours.dense, old.dense)


def test_values_only_for_another_optimizer_and_other_options(saved: tuple[LocalStore, list[str]]) -> None:
    trained, chain = saved
    option = EmbeddingVariableOption(value_dtype="bfloat16")
    specs = [dataclasses.replace(OLD[0], optimizer=Adagrad(0.5), option=option, seed=9), OLD[1]]
    with pytest.raises(ValueError, match=r"'user'.*optimizer.*Adam.*Adagrad"):
        start(store(specs), chain)
    with pytest.raises(ValueError, match=r"another optimizer.*Adam.*Adagrad"):
        start(store(OLD, optimizer=Adagrad()), chain)
    fresh = start(store(specs, optimizer=Adagrad()), chain, values_only=True)
    [block] = fresh.table("user").export()
    np.testing.assert_allclose(
        fresh.table("user").lookup(KEYS), trained.table("user").lookup(KEYS), rtol=2**-7
    )
    [untouched] = _fresh_slots(specs[0])
    np.testing.assert_array_equal(block.slots["accumulator"], untouched)
    ours, old = (one.pull(PullRequest({}, train=False)) for one in (fresh, trained))
    np.testing.assert_array_equal(ours.dense, old.dense)
    with pytest.raises(ValueError, match="embedding_dim=3 in the checkpoint, 5 in the table"):
        start(store([TableSpec("user", 5), OLD[1]]), chain, values_only=True)


def _fresh_slots(spec: TableSpec) -> list[np.ndarray]:
    made = store([spec])
    made.table("user").lookup(KEYS, train=True)
    return [block.slots["accumulator"] for block in made.table("user").export()]


def test_a_subset_of_tables(saved: tuple[LocalStore, list[str]]) -> None:
    trained, chain = saved
    fresh = start(store(OLD), chain, tables=("item",))
    assert (len(fresh.table("user")), len(fresh.table("item"))) == (0, 3)
    np.testing.assert_array_equal(fresh.table("item").lookup(KEYS), trained.table("item").lookup(KEYS))
    with pytest.raises(ValueError, match="'nobody'"):
        start(store(OLD), chain, tables=("nobody",))


def test_renamed_and_new_tables(saved: tuple[LocalStore, list[str]]) -> None:
    trained, chain = saved
    product = dataclasses.replace(OLD[1], name="product")
    wider = [OLD[0], product, TableSpec("shop", 4)]
    for options in ({}, {"rename": {"item": "product"}}, {"new_tables": True}):
        with pytest.raises(
            ValueError, match=r"other tables.*\['item', 'user'\].*\['product', 'shop', 'user'\]"
        ):
            start(store(wider), chain, **options)
    fresh = start(store(wider), chain, rename={"item": "product"}, new_tables=True)
    np.testing.assert_array_equal(fresh.table("product").lookup(KEYS), trained.table("item").lookup(KEYS))
    assert len(fresh.table("shop")) == 0
    # Two tables that change names are not mixed up.
    swapped = [TableSpec("item", 3, optimizer=Adam(0.1)), TableSpec("user", 2, optimizer=Adam(0.1))]
    fresh = start(store(swapped), chain, rename={"item": "user", "user": "item"})
    np.testing.assert_array_equal(fresh.table("user").lookup(KEYS), trained.table("item").lookup(KEYS))
    with pytest.raises(ValueError, match="cannot become one"):
        WarmStart("x", rename={"a": "c", "b": "c"})


def test_dense_only_and_none(saved: tuple[LocalStore, list[str]]) -> None:
    trained, chain = saved
    old = trained.pull(PullRequest({}, train=False))
    other = [TableSpec("elsewhere", 7)]
    fresh = start(store(other), chain, dense_only=True)
    np.testing.assert_array_equal(fresh.pull(PullRequest({}, train=False)).dense, old.dense)
    assert len(fresh.table("elsewhere")) == 0
    with pytest.raises(ValueError, match=r"4 parameters.*6 and 1"):
        start(store(OLD, dense=6), chain)
    fresh = start(store(OLD, dense=6), chain, dense=False)
    np.testing.assert_array_equal(fresh.pull(PullRequest({}, train=False)).dense, np.zeros(6))
    assert len(fresh.table("user")) == 3
    with pytest.raises(ValueError, match="dense_only takes"):
        WarmStart("x", dense_only=True, tables=("user",))


def test_it_travels_as_json() -> None:
    warm = WarmStart("s3://a/b", True, ("user",), {"item": "user"}, True, False)
    assert WarmStart.from_dict(warm.to_dict()) == warm
    assert WarmStart.from_dict(WarmStart("x").to_dict()) == WarmStart("x")
