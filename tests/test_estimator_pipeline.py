"""Options of an Estimator that follow from others, and as a configuration gives them."""

from __future__ import annotations

from typing import Any

import pytest

from deeprec_spark.config import load_config
from deeprec_spark.estimator_options import EstimatorOptions
from deeprec_spark.training.pipeline import PipelineOptions
from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("options", "staleness", "warmup"),
    [
        ({}, 0, 0),
        ({"num_ps": 1}, 1, 500),
        ({"placement": "colocated", "num_workers": 2}, 1, 500),
        ({"num_ps": 1, "mode": "sync"}, 0, 0),
        ({"num_ps": 1, "pipeline": PipelineOptions(max_staleness=0)}, 0, 0),
        ({"num_ps": 1, "pipeline": PipelineOptions(parallel_steps=2)}, 1, 500),
        ({"num_ps": 1, "pipeline": PipelineOptions(warmup_updates=7)}, 1, 7),
        ({"pipeline": PipelineOptions(parallel_steps=2)}, 0, 0),
        ({"pipeline": PipelineOptions(max_staleness=3)}, 3, 0),
        ({"pipeline": PipelineOptions(max_staleness=3, warmup_updates=9)}, 3, 9),
    ],
)
def test_asynchronous_servers_are_pulled_from_ahead_after_a_while(
    options: dict[str, Any], staleness: int, warmup: int
) -> None:
    expected = PipelineOptions(2, staleness, warmup_updates=warmup)
    assert EstimatorOptions(**options).pipeline_options == expected


def test_a_configuration_says_how_far_stages_run_ahead_and_what_rows_are_on_the_wire() -> None:
    path = ROOT / "conf" / "movielens.yaml"
    config = load_config(path)
    assert config.training.pipeline is None
    assert config.cluster.wire_dtype == "float32"
    changed = load_config(
        path, ["training.pipeline={depth: 3, max_staleness: 1}", "cluster.wire_dtype=bfloat16"]
    )
    assert changed.training.pipeline is not None
    assert changed.training.pipeline.make_options() == PipelineOptions(3, 1)
    assert changed.cluster.wire_dtype == "bfloat16"
