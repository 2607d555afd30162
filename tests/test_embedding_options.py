"""Options and optimizers: checks and the JSON round trip."""

import json

import pytest

from deeprec_spark.embedding.optimizers import SGD, Adagrad, Adam, AdamAsync, AdamW, Ftrl, Optimizer, RMSprop
from deeprec_spark.embedding.options import (
    Constant,
    CounterFilter,
    EmbeddingVariableOption,
    GlobalStepEvict,
    Initializer,
    InitializerOption,
    Normal,
    StorageOption,
    TruncatedNormal,
    Uniform,
)


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
