"""The jobs on a local session: prepare, train, evaluate, export, predict, query; exit codes and results."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from deeprec_spark.config import JobConfig, parse_config
from deeprec_spark.features.planted import exact_auc
from deeprec_spark.fitting import FitStatistics
from deeprec_spark.jobs import common
from deeprec_spark.jobs.evaluate import evaluate
from deeprec_spark.jobs.evaluate import main as evaluate_main
from deeprec_spark.jobs.export import export
from deeprec_spark.jobs.predict import predict
from deeprec_spark.jobs.prepare_features import main as prepare_main
from deeprec_spark.jobs.prepare_features import prepare
from deeprec_spark.jobs.train import main as train_main
from deeprec_spark.jobs.train import summarize, train
from deeprec_spark.runtime.errors import TerminatedError
from deeprec_spark.tracing.staleness import Staleness

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS = 3000


def job_values(out: Path) -> dict[str, Any]:
    return {
        "name": "test",
        "data": {"kind": "synthetic", "rows": ROWS, "prepared": str(out / "prepared")},
        "model": {"name": "deepfm", "options": {"embedding_dim": 4, "hidden_units": [8]}},
        "training": {"model_dir": str(out / "model_dir"), "epochs": 1, "batch_size": 256},
        "export": {"path": str(out / "model")},
    }


@pytest.fixture(scope="module")
def done(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[JobConfig, dict[str, Any]]:
    """One run of all jobs, and what each returned."""
    config = parse_config(job_values(tmp_path_factory.mktemp("job")))
    jobs: dict[str, common.Job] = {"prepare": prepare, "train": train, "evaluate": evaluate, "export": export}
    return config, {name: job(spark, config) for name, job in jobs.items()}


def test_each_job_reports_what_it_did(done: tuple[JobConfig, dict[str, Any]]) -> None:
    _, results = done
    assert results["prepare"]["rows"] == ROWS
    assert results["prepare"]["train_rows"] + results["prepare"]["test_rows"] == ROWS
    assert results["train"]["rows"] == results["prepare"]["train_rows"]
    assert results["train"]["steps"] == -(-results["prepare"]["train_rows"] // 256)
    assert results["train"]["samples_per_s"] > 0
    assert 0.4 < results["evaluate"]["auc"] < results["evaluate"]["best_auc"] < 1
    json.dumps(results)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_steps_are_updates_of_the_model_in_both_modes(tmp_path: Path, mode: str) -> None:
    values = {**job_values(tmp_path), "cluster": {"num_ps": 1, "workers": 4, "mode": mode}}
    result = summarize(
        parse_config(values),
        FitStatistics(
            rows=1000, steps=10, seconds=2.0, stale_pulls=7, max_staleness=1, staleness=Staleness(10, 25, 6)
        ),
        {"auc": [0.5, 0.7]},
    )
    assert (result["max_staleness"], result["stale_pulls"]) == (1, 7)
    assert result["staleness"] == {"mean": 2.5, "most": 6}
    assert (result["steps"], result["rows"], result["samples_per_s"]) == (10, 1000, 500)
    assert result["metrics"] == {"auc": 0.7}


def test_a_second_train_goes_on_from_the_first(
    spark: SparkSession, done: tuple[JobConfig, dict[str, Any]]
) -> None:
    config, results = done
    out = Path(config.data.prepared).parent
    copied = out / "again"
    shutil.copytree(config.training.model_dir, copied)
    values = job_values(out)
    values["training"]["model_dir"] = str(copied)
    again = train(spark, parse_config(values))
    steps = sorted(int(folder.name) for folder in (copied / "checkpoints").iterdir())
    assert steps[-1] == results["train"]["steps"] + again["steps"]


def test_the_exported_model_answers_raw_rows_without_spark(
    done: tuple[JobConfig, dict[str, Any]], run_python: Any
) -> None:
    model = done[1]["export"]["model"]
    row = {**{f"I{i}": float(i) for i in range(1, 14)}, **{f"C{i}": f"value-{i}" for i in range(1, 27)}}
    code = f"""
import json, sys
sys.modules["pyspark"] = None  # importing it is an error from here on
from deeprec_spark.query import model_spec, query
print(json.dumps([query({model!r}, [{row!r}] * 2), model_spec({model!r}).feature_names]))
"""
    answers, names = json.loads(run_python(code).stdout)
    assert names == list(row)
    assert answers[0] == answers[1]
    assert all(0 < value < 1 for value in answers[0].values())


def test_predictions_are_those_that_evaluate_judged(
    spark: SparkSession, done: tuple[JobConfig, dict[str, Any]]
) -> None:
    config, results = done
    written = predict(spark, config)
    assert written["rows"] == results["prepare"]["test_rows"]
    scored = spark.read.parquet(written["output"]).select("label", "prediction").toPandas()
    # Keras's AUC is a sum over 200 thresholds.
    assert exact_auc(scored["label"].to_numpy(), scored["prediction"].to_numpy()) == pytest.approx(
        results["evaluate"]["auc"], abs=0.01
    )


def test_evaluate_fails_below_the_wanted_auc(
    spark: SparkSession,
    done: tuple[JobConfig, dict[str, Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config, _ = done
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    result = tmp_path / "result.json"
    arguments = ["--conf", str(file), "--result", str(result)]
    assert evaluate_main([*arguments, "--set", "evaluation.min_auc=0.999"]) == common.EXIT_FAILURE
    assert "evaluation.min_auc asks for 0.999" in caplog.text
    assert not result.exists()
    assert evaluate_main([*arguments, "--set", "evaluation.min_auc=0.1"]) == common.EXIT_OK
    assert json.loads(result.read_text())["auc"] > 0.1


def test_a_wrong_configuration_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_values(tmp_path)))
    assert train_main(["--conf", str(file), "--set", "training.epochs=0"]) == common.EXIT_CONFIG
    assert train_main(["--conf", str(tmp_path / "none.yaml")]) == common.EXIT_CONFIG
    with pytest.raises(SystemExit) as caught:
        train_main([])
    assert caught.value.code == 2
    assert "RESULT" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("job", "message"),
    [(train_main, "run the prepare job"), (evaluate_main, "run the prepare job")],
)
def test_jobs_in_the_wrong_order_say_so(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture, job: Any, message: str
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job_values(tmp_path)))
    assert job(["--conf", str(file)]) == common.EXIT_FAILURE
    assert message in caplog.text


def test_a_file_that_is_not_there(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = job_values(tmp_path)
    values["data"] = {
        "kind": "criteo",
        "path": str(tmp_path / "none.tsv"),
        "prepared": str(tmp_path / "prepared"),
    }
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(values))
    assert prepare_main(["--conf", str(file)]) == common.EXIT_FAILURE
    assert "none.tsv" in caplog.text


CRITEO = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
ROW = ["0", *["1"] * 13, *["05db9164"] * 26]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([CRITEO, *[ROW] * 9, ["1", *ROW[1:]]], None),
        ([[*CRITEO[:-1], "C27"], ROW], r"lacks \['C26'\]"),
        ([CRITEO, *[["7", *ROW[1:]]] * 4], "malformed"),
        ([CRITEO, *[["0", "many", *ROW[2:]]] * 4], "malformed"),
        ([CRITEO], "rows"),
    ],
    ids=["good", "wrong-column", "label-out-of-range", "no-number", "empty"],
)
def test_bad_rows_end_with_an_error_that_names_them(
    spark: SparkSession,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    lines: list[list[str]],
    message: str | None,
) -> None:
    (tmp_path / "rows.tsv").write_text("".join("\t".join(line) + "\n" for line in lines))
    values = job_values(tmp_path)
    values["data"] = {
        "kind": "criteo",
        "path": str(tmp_path / "rows.tsv"),
        "prepared": str(tmp_path / "prepared"),
        "test_fraction": 0.5,
    }
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(values))
    code = prepare_main(["--conf", str(file)])
    if message is None:
        assert code == common.EXIT_OK
    else:
        assert code == common.EXIT_FAILURE
        assert re.search(message, caplog.text)
        assert not (tmp_path / "prepared" / "feature_spec.json").exists()


def test_a_checkpoint_of_another_model_is_refused(
    spark: SparkSession,
    done: tuple[JobConfig, dict[str, Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config, _ = done
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    before = sorted(Path(config.training.model_dir).rglob("*"))
    assert train_main(["--conf", str(file), "--set", "model.options.embedding_dim=8"]) == common.EXIT_FAILURE
    assert "checkpoint" in caplog.text.lower()
    assert sorted(Path(config.training.model_dir).rglob("*")) == before


def test_results_are_json_for_everyone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    common.report(
        {"auc": float("nan"), "metrics": {"at": [0.5, float("nan")]}}, str(tmp_path / "new" / "result.json")
    )
    assert capsys.readouterr().out == 'RESULT {"auc": null, "metrics": {"at": [0.5, null]}}\n'
    assert json.loads((tmp_path / "new" / "result.json").read_text()) == {
        "auc": None,
        "metrics": {"at": [0.5, None]},
    }


def test_a_job_that_was_told_to_end_says_so_by_its_exit_code(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def job(session: SparkSession, config: JobConfig) -> common.Result:
        raise TerminatedError("SIGTERM: saved")

    code = common.run_config(job, parse_config(job_values(tmp_path)))
    assert code == common.EXIT_TERMINATED == 143
    assert "SIGTERM: saved" in caplog.text
    assert "Traceback" not in caplog.text
