"""Options and optimizers: checks and the JSON round trip."""

import json
import re
from collections.abc import Callable

import numpy as np
import pytest

from deeprec_spark.embedding.adaptive import AdaptiveEmbedding
from deeprec_spark.embedding.dense import DenseVector
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.multi_hash import MultiHashVariable
from deeprec_spark.embedding.optimizers import SGD, Adagrad, Adam, AdamAsync, AdamW, Ftrl, Optimizer, RMSprop
from deeprec_spark.embedding.options import (
    CBFFilter,
    Constant,
    CounterFilter,
    DynamicDimensionOption,
    EmbeddingVariableOption,
    GlobalStepEvict,
    Initializer,
    InitializerOption,
    L2WeightEvict,
    Normal,
    ProbabilityFilter,
    StorageOption,
    TimeEvict,
    TruncatedNormal,
    Uniform,
)
from deeprec_spark.embedding.store import PushRequest, SparseGradient, TableSpec
from deeprec_spark.embedding.variable import EmbeddingVariable


@pytest.mark.parametrize(
    "initializer", [Constant(0.5), Uniform(-1.0, 2.0), Normal(1.0, 2.0), TruncatedNormal()]
)
def test_option_survives_json(initializer: Initializer) -> None:
    option = EmbeddingVariableOption(
        filter_option=CounterFilter(filter_freq=3),
        evict_option=GlobalStepEvict(steps_to_live=7),
        init_option=InitializerOption(initializer, default_value_no_permission=0.25),
    )
    assert EmbeddingVariableOption.from_dict(json.loads(json.dumps(option.to_dict()))) == option


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(0.5, momentum=0.9, nesterov=True),
        Adagrad(0.1, initial_accumulator_value=0.5),
        Adam(beta_1=0.5),
        AdamW(weight_decay=0.1),
        AdamAsync(apply_sparse_rmsprop=True),
        Ftrl(l1_regularization_strength=0.1),
        RMSprop(momentum=0.5, centered=True),
    ],
)
def test_optimizer_survives_json(optimizer: Optimizer) -> None:
    back = Optimizer.from_dict(json.loads(json.dumps(optimizer.to_dict())))
    assert back == optimizer
    assert back.hyperparameters() == optimizer.hyperparameters()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CounterFilter(filter_freq=-1), "filter_freq=-1"),
        (lambda: GlobalStepEvict(steps_to_live=-5), "steps_to_live=-5"),
        (lambda: Uniform(1.0, 0.0), "minval=1.0"),
        (lambda: Normal(0.0, -1.0), "stddev=-1.0"),
        (lambda: Constant(float("nan")), "value=nan"),
        (lambda: StorageOption(storage_type="TAPE"), "storage_type='TAPE'"),  # type: ignore[arg-type]  # on purpose
        (lambda: EmbeddingVariableOption(filter_option=GlobalStepEvict(1)), "filter_option"),  # type: ignore[arg-type]  # on purpose
        (lambda: Adam(beta_1=1.0), "beta_1=1.0"),
        (lambda: SGD(learning_rate=-1.0), "learning_rate=-1.0"),
        (lambda: SGD(learning_rate=float("inf")), "learning_rate=inf"),
        (lambda: Ftrl(learning_rate_power=1.0), "learning_rate_power=1.0"),
    ],
)
def test_errors_name_what_was_received(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=r"Received: ") as caught:
        make()  # type: ignore[operator]  # a lambda
    assert message in str(caught.value)


def test_from_dict_refuses_another_kind_and_unknown_fields() -> None:
    with pytest.raises(ValueError, match="Not a known Optimizer"):
        Optimizer.from_dict(CounterFilter(2).to_dict())
    with pytest.raises(ValueError, match="speed"):
        Optimizer.from_dict({"type": "SGD", "speed": 1})


def test_learning_rate_does_not_part_saved_state_from_an_optimizer() -> None:
    assert Adagrad(0.1).compatible_with(Adagrad(0.2))
    assert not Adagrad(0.1).compatible_with(Adagrad(0.1, epsilon=1e-3))
    assert not Adagrad(0.1).compatible_with(SGD(0.1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GlobalStepEvict(2.5), "steps_to_live=2.5"),
        (lambda: TimeEvict(1.5), "seconds_to_live=1.5"),
        (lambda: CounterFilter(2.5), "filter_freq=2.5"),
        (lambda: CounterFilter(True), "filter_freq=True"),
        (lambda: CBFFilter(2, 1e6), "max_element_size=1000000.0"),
        (lambda: ProbabilityFilter("0.1"), "probability='0.1'"),
        (lambda: L2WeightEvict(float("nan")), "l2_weight_threshold=nan"),
        (lambda: StorageOption("DRAM", storage_size=(1e9,)), "storage_size=1000000000.0"),
        (lambda: StorageOption("DRAM", storage_size=1e9), "storage_size=1000000000.0"),
        (lambda: StorageOption("DRAM", storage_size=(0,)), "storage_size=0"),
        (lambda: StorageOption("DRAM_PMEM", 3), "storage_path=3"),
        (lambda: StorageOption("DRAM", numa_node=0), "storage_type='DRAM', numa_node=0"),
        (lambda: StorageOption("PMEM_MEMKIND", numa_node=0.5), "numa_node=0.5"),
        (lambda: DynamicDimensionOption(2.0, (3,)), "block_num=2.0"),
        (lambda: DynamicDimensionOption(2, (3.5,)), r"thresholds[0]=3.5"),
        (lambda: DynamicDimensionOption(2, 3), "thresholds=3"),
        (lambda: DynamicDimensionOption(2, refresh_steps=1.5), "refresh_steps=1.5"),
        (lambda: DynamicDimensionOption(2, decay="a"), "decay='a'"),
        (lambda: Constant(1e300), "value=1e+300"),
        (lambda: Constant("1"), "value='1'"),
        (lambda: Uniform(-3e38, 3e38), "minval=-3e+38"),
        (lambda: Normal(0.0, 1e38), "stddev=1e+38"),
        (lambda: TruncatedNormal(1e39, 1.0), "mean=1e+39"),
        (lambda: InitializerOption(default_value_no_permission=1e39), "default_value_no_permission=1e+39"),
        (lambda: EmbeddingVariableOption(evict_steps=5), "evict_steps=5, evict_option=None"),
        (
            lambda: EmbeddingVariableOption(evict_option=GlobalStepEvict(1), evict_steps=2.5),
            "evict_steps=2.5",
        ),
        (lambda: Adagrad(initial_accumulator_value=1e300), "initial_accumulator_value=1e+300"),
        (lambda: Adagrad(learning_rate="fast"), "learning_rate='fast'"),
        (lambda: EmbeddingVariable("t", 4, optimizer="adam"), "optimizer='adam'"),
        (lambda: EmbeddingVariable("t", 4, option=CounterFilter(3)), "option=CounterFilter(filter_freq=3)"),
        (lambda: EmbeddingVariable("t", 4, seed=0.5), "seed=0.5"),
        (lambda: EmbeddingVariable(7, 4), "name=7"),
        (lambda: EmbeddingVariable("t", 4).reserve(-1), "rows=-1"),
        (lambda: DenseVector(np.ones(2), "adam"), "optimizer='adam'"),
        (lambda: AdaptiveEmbedding("a", 4, hash_bucket_size=2.5, promote_freq=2), "hash_bucket_size=2.5"),
        (lambda: AdaptiveEmbedding("a", 4, hash_bucket_size=2, promote_freq=0), "promote_freq=0"),
        (lambda: AdaptiveEmbedding("a", 4, hash_bucket_size=2, promote_freq=2, option=SGD()), "option=SGD("),
        (lambda: MultiHashVariable("m", [(2.5, 4), (3, 4)]), "rows of dims=2.5"),
        (
            lambda: EmbeddingVariable("t", 4, option=EmbeddingVariableOption(evict_option=TimeEvict(2**70))),
            str(2**70),
        ),
    ],
)
def test_wrong_values_are_named_before_the_engine_sees_them(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=r"Received: ") as caught:
        make()
    assert message in str(caught.value)


def test_numbers_of_numpy_are_numbers() -> None:
    option = EmbeddingVariableOption(
        CounterFilter(np.int64(3)),  # type: ignore[arg-type]  # what this is about
        GlobalStepEvict(np.int32(7)),  # type: ignore[arg-type]  # likewise
        StorageOption(storage_size=np.int64(1 << 30)),  # type: ignore[arg-type]  # likewise
        InitializerOption(Constant(np.float32(0.5))),  # type: ignore[arg-type]  # likewise
        evict_steps=np.int64(5),  # type: ignore[arg-type]  # likewise
    )
    assert option.storage_option.storage_size == (1 << 30,)
    assert EmbeddingVariableOption.from_dict(json.loads(json.dumps(option.to_dict()))) == option
    table = EmbeddingVariable("t", 4, option=option, optimizer=Adagrad(np.float32(0.5)), seed=np.int64(3))  # type: ignore[arg-type]  # likewise
    table.lookup(np.arange(3).repeat(3), train=True)
    table.apply_gradients([1], np.ones((1, 4)), step=np.int64(5), learning_rate=np.float32(0.5))  # type: ignore[arg-type]  # likewise
    assert len(table) == 3


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -0.1, 1e300, "fast"])
def test_a_learning_rate_that_is_none_is_refused_everywhere(rate: float) -> None:
    """NaN was the engine's word for the optimizer's own rate; others were applied."""
    table = EmbeddingVariable("t", 2)
    before = table.lookup([1], train=True)
    vector = DenseVector(np.ones(2, np.float32), SGD(0.5))
    store = LocalStore()
    store.create_tables([TableSpec("t", 2)])
    part = {"t": SparseGradient(np.array([1]), np.ones((1, 2), np.float32))}
    for name, call in {
        "learning_rate": lambda: table.apply_gradients([1], np.ones((1, 2)), step=1, learning_rate=rate),
        " learning_rate": lambda: vector.apply(np.ones(2), rate),
        "sparse_learning_rate": lambda: store.push(
            PushRequest(part, None, None, 1, sparse_learning_rate=rate)
        ),
        "dense_learning_rate": lambda: store.push(PushRequest(part, None, None, 1, dense_learning_rate=rate)),
    }.items():
        with pytest.raises(ValueError, match=re.escape(f"Received: {name.strip()}={rate!r}")):
            call()
    np.testing.assert_array_equal(table.lookup([1]), before)
    assert vector.values.tolist() == [1, 1]
    assert (store.step, len(store.table("t"))) == (0, 0)


def test_calls_with_wrong_values_name_them() -> None:
    table = EmbeddingVariable("t", 2)
    table.lookup([1, 2], train=True)
    for call, message in (
        (lambda: table.export(0), "batch_rows=0"),
        (lambda: table.export(-1), "batch_rows=-1"),
        (lambda: table.evict(1.5), "step=1.5"),  # type: ignore[arg-type]  # on purpose
        (lambda: table.evict(1, now=float("nan")), "now=nan"),
        (lambda: table.apply_gradients([1], np.ones((1, 2)), step=2.0), "step=2.0"),  # type: ignore[arg-type]  # on purpose
    ):
        with pytest.raises(ValueError, match=f"Received: {message}"):
            call()  # type: ignore[no-untyped-call]  # a lambda


def test_export_takes_the_keys_of_the_moment_of_the_call() -> None:
    table = EmbeddingVariable("t", 2)
    table.lookup([1, 2], train=True)
    blocks = table.export()
    table.lookup([3], train=True)
    assert sorted(next(blocks).key) == [1, 2]
