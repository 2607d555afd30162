"""The command line: help, exit codes, and commands that need no Spark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from deeprec_spark.cli import app
from deeprec_spark.platform import demo, doctor
from deeprec_spark.platform.demo import DemoOptions, demo_config, detect_kind

COMMANDS = ("prepare", "train", "evaluate", "export", "predict", "query", "jars", "conf", "doctor", "demo")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command: str) -> None:
    done = invoke(command, "--help")
    assert done.exit_code == 0
    assert "Usage" in done.output


def test_there_are_no_others() -> None:
    assert {command.name or command.callback.__name__ for command in app.registered_commands} == set(COMMANDS)


def test_an_unknown_command_or_option_is_2() -> None:
    assert invoke("trian").exit_code == 2
    assert invoke("train").exit_code == 2
    assert invoke("train", "--confg", "x").exit_code == 2


def test_a_wrong_key_is_2_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(invoke("conf", "movielens").output)
    assert invoke("train", "--conf", str(file), "--set", "training.epoks=3").exit_code == 2
    assert "training.epoks: unknown key; did you mean 'epochs'?" in caplog.text


def test_conf_prints_what_can_be_read_again() -> None:
    assert invoke("conf").output.split() == ["criteo", "movielens", "synthetic"]
    assert yaml.safe_load(invoke("conf", "criteo").output)["data"]["kind"] == "criteo"
    assert invoke("conf", "netflix").exit_code == 2


def test_jars_are_files_that_spark_can_take() -> None:
    done = invoke("jars")
    assert done.exit_code == 0
    jars = done.output.strip().split(",")
    assert len(jars) == 4
    assert all(jar.endswith(".jar") and Path(jar).is_file() for jar in jars)


def test_doctor_is_content_with_this_environment() -> None:
    done = invoke("doctor")
    assert done.exit_code == 0, done.output
    assert "FAIL" not in done.output


def test_doctor_names_a_java_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    finding = doctor.java()
    assert not finding.ok
    assert str(tmp_path) in finding.found
    assert "Install Java 17" in finding.remedy
    assert invoke("doctor").exit_code == 1


@pytest.mark.parametrize(
    ("text", "ok"), [('openjdk version "1.8.0_372"', True), ('openjdk version "24.0.1"', False)]
)
def test_doctor_reads_javas_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, ok: bool
) -> None:
    program = tmp_path / "bin" / "java"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{text}' >&2\n")
    program.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert doctor.java().ok is ok


def test_doctor_sees_executors_that_would_run_another_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "/bin/sh")
    assert "unset PYSPARK_PYTHON" in doctor.python().remedy


def test_doctor_sees_a_spark_of_another_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / "spark-core_2.12-3.1.3.jar").touch()
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    finding = doctor.spark_home()
    assert not finding.ok
    assert "3.1.3" in finding.found


def test_demo_knows_what_a_path_holds(tmp_path: Path) -> None:
    assert detect_kind(None) == "synthetic"
    (tmp_path / "ml").mkdir()
    (tmp_path / "ml" / "u.data").touch()
    assert detect_kind(str(tmp_path / "ml")) == "movielens"
    (tmp_path / "train.tsv").touch()
    assert detect_kind(str(tmp_path / "train.tsv")) == "criteo"
    config = demo_config(
        DemoOptions(data=str(tmp_path / "ml"), out=tmp_path / "out", cluster=True, mode="sync")
    )
    assert (config.cluster.num_ps, config.cluster.workers, config.cluster.mode) == (1, 2, "sync")
    assert config.data.path == str(tmp_path / "ml")


def test_demo_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    done = invoke("demo", "--data", str(tmp_path / "none"))
    assert done.exit_code == 2
    assert "Received: data=" in done.output
    assert invoke("demo", "--mode", "fast").exit_code == 2


def test_demo_removes_only_what_a_demo_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = tmp_path / "mine" / "model" / "weights"
    mine.parent.mkdir(parents=True)
    mine.touch()
    assert invoke("demo", "--out", str(tmp_path / "mine")).exit_code == 2
    assert f"Received: out={str(tmp_path / 'mine')!r}" in caplog.text
    assert mine.is_file()
    with pytest.raises(ValueError, match="Received: out="):
        demo.check_out(mine)

    out = tmp_path / "new" / "out"
    for _ in range(2):
        demo.check_out(out)
        demo.clear_out(out)
        assert [path.name for path in out.iterdir()] == [demo.MARKER]
        (out / "model").mkdir()
        (out / "model" / "saved_model.pb").touch()


def test_the_example_row_has_the_columns_of_its_data() -> None:
    from deeprec_spark.features.criteo import criteo_spec
    from deeprec_spark.features.movielens import movielens_spec

    for kind, spec in (("movielens", movielens_spec()), ("synthetic", criteo_spec())):
        row = demo.example_row(demo_config(DemoOptions()) if kind == "synthetic" else _movielens())
        assert list(row) == spec.feature_names
        json.dumps(row)


def _movielens() -> Any:
    from deeprec_spark.config import parse_config
    from deeprec_spark.platform import resources

    return parse_config(yaml.safe_load(resources.read_conf("movielens")))


def test_query_of_nothing_is_2(tmp_path: Path) -> None:
    done = invoke("query", "--model", str(tmp_path), "--row", "{}")
    assert done.exit_code == 2
    assert "no exported model" in done.output


@pytest.mark.parametrize("text", ["notjson", "[1, 2]", "3", ""])
def test_query_names_a_row_that_is_no_json_object(tmp_path: Path, text: str) -> None:
    done = invoke("query", "--model", str(tmp_path), "--row", "{}", "--row", text)
    assert done.exit_code == 2
    assert "--row 2 must be a JSON object" in done.output
    assert f"Received: {text!r}" in done.output


def test_query_names_the_line_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("{}\n\n{'user': 1}\n")
    done = invoke("query", "--model", str(tmp_path), "--file", str(file))
    assert done.exit_code == 2
    assert f"{file}, line 3 must be a JSON object" in done.output
    missing = invoke("query", "--model", str(tmp_path), "--file", str(tmp_path / "none.jsonl"))
    assert missing.exit_code == 2
    assert "none.jsonl" in missing.output
