"""Every model by name: it trains, its config round trips, and wrong options are named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import keras
import numpy as np
import pytest

from deeprec_spark import models
from deeprec_spark.data import Batch
from deeprec_spark.embedding.local_store import LocalStore
from deeprec_spark.embedding.options import CounterFilter, EmbeddingVariableOption
from deeprec_spark.features.spec import Feature, FeatureKind, FeatureSpec, Label
from deeprec_spark.layers.tables import table_specs
from deeprec_spark.training.trainer import Trainer

CATEGORICAL, SEQUENCE, DENSE = FeatureKind.CATEGORICAL, FeatureKind.SEQUENCE, FeatureKind.DENSE
SPEC = FeatureSpec(
    features=(
        Feature(name="user", kind=CATEGORICAL, raw_type="int64", group="user"),
        Feature(name="item", kind=CATEGORICAL, raw_type="int64", table="items", group="item"),
        Feature(name="seen", kind=SEQUENCE, raw_type="int64", max_length=3, table="items", group="user"),
        Feature(name="tags", kind=SEQUENCE, raw_type="string", max_length=2, embedding_dim=2, group="item"),
        Feature(name="age", kind=DENSE, raw_type="float32", group="user"),
        Feature(name="image", kind=DENSE, raw_type="float32", width=3, group="item"),
    ),
    labels=(Label(name="click"), Label(name="price", kind="regression")),
)
SMALL = {
    "wdl": {"hidden_units": [8]},
    "deepfm": {"hidden_units": [8]},
    "dlrm": {"bottom_units": [8], "top_units": [8]},
    "dssm": {"user_units": [8, 4], "item_units": [4]},
    "din": {"hidden_units": [8], "attention_units": [4]},
    "mmoe": {"num_experts": 2, "expert_units": [8], "tower_units": [4]},
}


def rows(n: int) -> Batch:
    """Rows whose click depends on user and item alone."""
    random = np.random.default_rng(3)
    user, item = random.integers(-4, 4, n), random.integers(0, 8, n)
    click = ((user * item) % 3 == 0).astype(np.float32)
    return Batch(
        {
            "user": user,
            "item": item,
            "seen": np.where(random.random((n, 3)) < 0.4, -1, random.integers(0, 8, (n, 3))),
            "tags": np.full((n, 2), -1, np.int64),
            "age": random.random(n).astype(np.float32),
            "image": random.random((n, 3)).astype(np.float32),
        },
        {"click": click, "price": 2 * click},
    )


@pytest.mark.parametrize("name", models.names())
def test_each_model_learns_what_its_embeddings_hold(name: str) -> None:
    keras.utils.set_random_seed(0)
    options = {**SMALL[name], "embedding_dim": 4}
    model = models.create(name, SPEC, **options, **({} if name == "mmoe" else {"label": "click"}))
    losses = {"click": "binary_crossentropy", "price": "mse"}
    loss = losses if name == "mmoe" else "binary_crossentropy"
    model.compile(keras.optimizers.Adam(0.05), loss=loss)
    batch = rows(256)  # holds both labels: a model with one output takes the one that it is named after
    trainer = Trainer(model, LocalStore())
    trainer.initialize(batch)
    trainer.train_step(batch)
    first = trainer.metric_results()["loss"]
    for _ in range(40):
        trainer.reset_metrics()
        trainer.train_step(batch)
    assert trainer.metric_results()["loss"] < 0.5 * first
    copy = keras.models.model_from_json(json.dumps(json.loads(model.to_json())))
    assert [weight.shape for weight in copy.weights] == [weight.shape for weight in model.weights]
    assert {(t.name, t.embedding_dim) for t in table_specs(copy)} == {
        (t.name, t.embedding_dim) for t in table_specs(model)
    }


@pytest.mark.parametrize("name", models.names())
def test_options_round_trip_as_json(name: str) -> None:
    option = EmbeddingVariableOption(filter_option=CounterFilter(filter_freq=3))
    options = models.options_of(name, **SMALL[name], ev_option=option.to_dict(), seed=7)
    again = models.options_of(name, **json.loads(json.dumps(options.to_dict())))
    assert again == options
    assert options.ev_option == option
    assert dataclasses.is_dataclass(options)


def test_wrong_names_and_options_say_what_is_known() -> None:
    with pytest.raises(ValueError, match=r"known are deepfm, din.*name='deepfn'"):
        models.create("deepfn", SPEC)
    with pytest.raises(ValueError, match=r"DeepFMOptions: units: .*Known: embedding_dim, .*hidden_units"):
        models.create("deepfm", SPEC, units=[3])
    with pytest.raises(ValueError, match=r"hidden_units.1: Input should be greater than 0"):
        models.create("deepfm", SPEC, hidden_units=[3, 0])


def test_specs_that_a_model_cannot_use_are_refused() -> None:
    lone = FeatureSpec(features=SPEC.features[:1], labels=SPEC.labels[:1])
    with pytest.raises(ValueError, match=r"group 'item'.*groups={'user': 'user'}"):
        models.create("dssm", lone)
    with pytest.raises(ValueError, match=r"same `table`.*tables={'user': 'user'}"):
        models.create("din", lone)
    with pytest.raises(ValueError, match="one output for each label"):
        models.create("mmoe", FeatureSpec(features=SPEC.features))
    with pytest.raises(ValueError, match="same width"):
        models.create("dssm", SPEC, user_units=[3], item_units=[4])


def test_a_lone_feature_is_enough() -> None:
    lone = FeatureSpec(features=SPEC.features[:1], labels=SPEC.labels[:1])
    for name in ("wdl", "deepfm", "dlrm", "mmoe"):
        assert models.create(name, lone, **SMALL[name]).count_params() > 0


def test_the_towers_of_dssm_meet_in_its_score() -> None:
    model = models.create("dssm", SPEC, label="click", **SMALL["dssm"])
    user, item = models.towers(model, SPEC)
    assert (set(user.input), set(item.input)) == (
        {"user", "seen", "age"},
        {"item", "tags", "image"},
    )
    batch = rows(6).features
    dots = np.sum(
        np.asarray(user({name: batch[name] for name in user.input}))
        * np.asarray(item({name: batch[name] for name in item.input})),
        axis=-1,
    )
    scale = model.get_layer("score.scale")
    score = dots * np.asarray(scale.kernel)[0, 0] + np.asarray(scale.bias)[0]
    np.testing.assert_allclose(np.asarray(model(dict(batch)))[:, 0], 1 / (1 + np.exp(-score)), atol=1e-5)


def test_a_model_of_ones_own_can_be_registered() -> None:
    with pytest.raises(ValueError, match="name='wdl'"):
        models.register("wdl", models.WDLOptions, models.wdl)


@pytest.mark.parametrize("name", models.names())
def test_names_with_spaces_and_accents_work(name: str) -> None:
    renamed = FeatureSpec(
        features=tuple(feature.model_copy(update={"name": f"{feature.name} ö"}) for feature in SPEC.features),
        labels=(Label(name="bought it"),),
    )
    model = models.create(name, renamed, **SMALL[name])
    model.compile("sgd", loss="binary_crossentropy" if name != "mmoe" else {"bought it": "mse"})
    batch = rows(8)
    batch = Batch(
        {f"{feature} ö": array for feature, array in batch.features.items()},
        {"bought it": batch.labels["click"]},
    )
    trainer = Trainer(model, LocalStore())
    trainer.initialize(batch)
    trainer.train_step(batch)
    assert np.isfinite(trainer.metric_results()["loss"])


def test_the_page_names_every_model_and_option() -> None:
    page = (Path(__file__).parent.parent / "docs" / "models.md").read_text(encoding="utf-8")
    options = {field.name for name in models.names() for field in dataclasses.fields(models.options_of(name))}
    assert {name for name in {*models.names(), *options} if f"`{name}`" not in page} == set()
