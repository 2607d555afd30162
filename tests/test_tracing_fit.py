"""Fits with tracing on: one server and one worker as real nodes, and what is left of a fit that had to start again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deeprec_spark.estimator import Estimator
from deeprec_spark.tracing import STAGES, TracingOptions
from deeprec_spark.training.pipeline import PipelineOptions
from tests.test_estimator import FEATURES, ROWS, creator
from tests.test_tracing_output import scalars

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.timeout(240)
BATCH = 50


@pytest.fixture(scope="module")
def data(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> str:
    place = str(tmp_path_factory.mktemp("data") / "rows")
    rows = [(i % 40, f"city {i % 7}", float(i % 5), int(i % 2)) for i in range(ROWS)]
    spark.createDataFrame(rows, "user long, city string, age double, click int").coalesce(2).write.parquet(
        place
    )
    return place


def test_trace_page_and_scalars_of_a_server_and_a_worker(
    spark: SparkSession, data: str, tmp_path: Path
) -> None:
    estimator = Estimator.from_keras(
        model_creator=creator,
        num_ps=1,
        num_workers=1,
        model_dir=str(tmp_path),
        tracing=TracingOptions(interval_secs=0.5),
        pipeline=PipelineOptions(warmup_updates=0),
        spark=spark,
    )
    estimator.fit(data, epochs=2, batch_size=BATCH, feature_cols=FEATURES, label_cols=["click"], verbose=0)
    folder = tmp_path / "tracing"
    events: list[dict[str, Any]] = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert set(names) == {"driver", "server 0", "worker 0"}
    spans = [event for event in events if event["ph"] == "X"]

    def of(node: str, name: str) -> list[dict[str, Any]]:
        return [span for span in spans if span["pid"] == names[node] and span["name"] == name]

    steps = 2 * ROWS // BATCH
    for stage in ("prepare", "pull", "compute", "push"):
        assert len(of("worker 0", stage)) == steps
    assert len(of("driver", "epoch")) == 2
    # Each push that the server handled lies within one of the worker's, once their clocks are the same.
    slack = 1e3 * max(
        json.loads((folder / "trace.json").read_text())["otherData"]["clock uncertainty in ms"].values()
    )
    handled = of("server 0", "push")
    assert len(handled) == steps
    for push, inner in zip(of("worker 0", "push"), handled, strict=True):
        assert push["ts"] - slack <= inner["ts"]
        assert inner["ts"] + inner["dur"] <= push["ts"] + push["dur"] + slack
    found = scalars(folder / "worker 0")
    assert {f"ms per step/{stage}" for stage in STAGES} <= set(found)
    assert found["samples per second"][-1][0] == steps
    # Its rows were read before its last push, which is the one update that came between.
    assert found["staleness/most so far"][-1] == (steps, 1.0)
    assert {"staleness/mean", "staleness/pulled ahead"} <= set(found)
    served = scalars(folder / "server 0")
    assert served["rows/user_table"][-1] == (steps, 40.0)
    assert served["calls per second/push"][-1][0] == steps
    report = json.loads((folder / "report.json").read_text())
    assert report == json.loads(json.dumps(estimator.report().to_dict()))
    assert (folder / "report.html").read_text() == estimator.report().to_html()


def test_a_failed_fit_leaves_its_report(spark: SparkSession, data: str, tmp_path: Path) -> None:
    estimator = Estimator.from_keras(
        model_creator=creator, model_dir=str(tmp_path), tracing=TracingOptions(tensorboard=False), spark=spark
    )
    with pytest.raises(Exception, match="stop here"):
        estimator.fit(
            data,
            epochs=2,
            batch_size=BATCH,
            feature_cols=FEATURES,
            label_cols=["click"],
            verbose=0,
            callbacks=[stopping()],
        )
    report = json.loads((tmp_path / "tracing" / "report.json").read_text())
    assert report["workers"][0]["samples"] == ROWS
    events = json.loads((tmp_path / "tracing" / "trace.json").read_text())["traceEvents"]
    assert sum(event["name"] == "push" for event in events) == ROWS // BATCH


def stopping() -> Any:
    import keras

    class Stopping(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            raise RuntimeError("stop here")

    return Stopping()
