"""init_session: found or made, with the right Python, Java and jars, or an error that says what is missing."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from deeprec_spark import session
from deeprec_spark.session import SessionError, SessionOptions, current_session, find_jars, init_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import RunPython

needs_bigdl = pytest.mark.skipif(not find_jars(), reason="BigDL is not installed")


def fake_java(folder: Path, output: str) -> Path:
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{output}\nEND\n")
    java.chmod(0o755)
    return folder


def test_the_session_that_is_there_is_taken(spark: SparkSession, caplog: pytest.LogCaptureFixture) -> None:
    partitions = spark.conf.get("spark.sql.shuffle.partitions")
    found = init_session({"spark.sql.shuffle.partitions": "3", "spark.executor.memory": "7g"})
    try:
        assert found is spark
        assert current_session() is spark
        assert spark.conf.get("spark.sql.shuffle.partitions") == "3"
        assert "['spark.executor.memory'] cannot change any more" in caplog.text
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", partitions or "2")


def test_keys_must_be_sparks() -> None:
    with pytest.raises(SessionError, match=r"begin with `spark\.`.*\['master'\]"):
        SessionOptions(conf={"master": "local"})


@pytest.mark.parametrize(
    ("output", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_372"', 8),
        ('openjdk version "21" 2023-09-19', 21),
        ('Picked up JAVA_TOOL_OPTIONS: -Dx\nopenjdk version "11.0.2"', 11),
        ("command not found", None),
    ],
)
def test_java_versions(output: str, version: int | None) -> None:
    assert session._java_version(output) == version


def test_a_java_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "absent"))
    with pytest.raises(SessionError, match=r"No Java was found.*install it, or set JAVA_HOME.*absent"):
        session._check_java()
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "new", 'openjdk version "99.0.1"')))
    with pytest.raises(SessionError, match="Received: Java 99 at"):
        session._check_java()
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "odd", "no version here")))
    with pytest.raises(SessionError, match="does not tell its version"):
        session._check_java()
    monkeypatch.setattr(session, "_spark_major", lambda: 4)
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "old", 'java version "1.8.0_372"')))
    with pytest.raises(SessionError, match="needs Java 17"):
        session._check_java()


def test_jars_of_all_parts_or_an_error_that_names_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "bigdl"
    for part in ("core", "dllib", "orca", "friesian"):
        (package / "share" / part / "lib").mkdir(parents=True)
        (package / "share" / part / "lib" / f"{part}.jar").touch()
    (package / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "bigdl", raising=False)
    assert [jar.name for jar in find_jars()] == ["core.jar", "dllib.jar", "orca.jar", "friesian.jar"]
    (package / "share" / "core" / "lib" / "core.jar").unlink()
    with pytest.raises(SessionError, match=r"\['core'\].*pip install --no-deps bigdl-core==2\.4\.0\.dev0"):
        find_jars()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "nothing")])
    assert find_jars() == []


def test_python_home_in_a_virtual_environment_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.prefix == sys.base_prefix:
        pytest.skip("not a virtual environment")
    monkeypatch.setenv("PYTHONHOME", sys.prefix)
    session._drop_python_home()
    assert "PYTHONHOME" not in os.environ
    monkeypatch.setenv("PYTHONHOME", sys.base_prefix)
    session._drop_python_home()
    assert os.environ["PYTHONHOME"] == sys.base_prefix


def test_a_python_for_workers_that_does_not_fit(tmp_path: Path) -> None:
    session._check_python(sys.executable)
    with pytest.raises(SessionError, match=r"cannot be started.*Set PYSPARK_PYTHON=.*absent"):
        session._check_python(str(tmp_path / "absent"))
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\necho 3.8\n")
    old.chmod(0o755)
    with pytest.raises(SessionError, match=r"driver's Python version.*version '?3\.8'? beside"):
        session._check_python(str(old))


CHILD = """
import os, sys
from deeprec_spark.session import SessionError, SessionOptions, current_session, init_session
try:
    current_session()
except SessionError as error:
    print("none:", error)
spark = init_session({conf})
print("python:", spark.range(1).rdd.map(lambda _: __import__("sys").executable).first())
print("settings:", spark.conf.get("spark.app.name"), spark.sparkContext.master, os.environ.get("PYTHONHOME"))
{rest}
spark.stop()
"""


def child(conf: str, rest: str = "") -> str:
    return CHILD.replace("{conf}", conf).replace("{rest}", rest)


def without_python() -> dict[str, str]:
    """A PATH whose first python3 is not this environment's, and no word of ours about it."""
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "SPARK_LOCAL_IP": "127.0.0.1"}


def test_a_new_session_runs_this_python_on_executors(
    run_python: RunPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    monkeypatch.delenv("PYSPARK_DRIVER_PYTHON", raising=False)
    conf = 'SessionOptions({"spark.master": "local[1]", "spark.ui.enabled": "false"}, bigdl=False)'
    done = run_python(child(conf), env=without_python())
    assert "none: There is no SparkSession: call init_session() first" in done.stdout
    assert f"python: {sys.executable}\n" in done.stdout
    assert "settings: deeprec-spark local[1] None" in done.stdout


def test_a_session_made_by_others_gets_this_python(
    run_python: RunPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    monkeypatch.delenv("PYSPARK_DRIVER_PYTHON", raising=False)
    made = """
from pyspark.sql import SparkSession
SparkSession.builder.master("local[1]").appName("theirs").config("spark.ui.enabled", "false").getOrCreate()
"""
    done = run_python(
        made + child("").replace("current_session()\n", "raise SessionError('theirs')\n"),
        env=without_python(),
    )
    assert f"python: {sys.executable}\n" in done.stdout
    assert "settings: theirs local[1] None" in done.stdout
    if find_jars():
        assert "spark-submit --jars $(deeprec-spark jars)" in done.stderr


@needs_bigdl
def test_a_new_session_has_friesians_functions(run_python: RunPython, tmp_path: Path) -> None:
    rest = """
import logging
from deeprec_spark.features.friesian import from_friesian, to_friesian
from deeprec_spark.features.table import FeatureTable
from bigdl.friesian.feature import FeatureTable as Friesian
table = FeatureTable(spark.createDataFrame([("a", 1), ("b", 2), ("a", 3)], "s string, i int").repartition(2))
assert isinstance(table, Friesian)
theirs = to_friesian(table)
print("index:", sorted(theirs.gen_string_idx("s").to_dict()), sorted(table.gen_string_idx("s").to_dict()))
print("back:", from_friesian(theirs.fillna(0, ["i"])).size())
spark2 = init_session(SessionOptions(bigdl=True))
assert spark2 is spark
print("left:", os.listdir("."), spark.sparkContext._jvm.org.apache.log4j.Logger.getRootLogger().getLevel())
"""
    conf = '{"spark.master": "local[2]", "spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "2"}'
    done = run_python(child(conf, rest), env={"SPARK_LOCAL_IP": "127.0.0.1"})
    assert "index: ['a', 'b'] ['a', 'b']" in done.stdout
    assert "back: 3" in done.stdout
    assert "bigdl.log" not in done.stdout.split("left:")[1]
    assert not (tmp_path / "bigdl.log").exists()


def test_bigdl_that_cannot_be_had_is_an_error_only_if_asked_for(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "find_jars", list)
    assert init_session(SessionOptions(bigdl=None)) is spark
    with pytest.raises(SessionError, match=r"BigDL is not installed: run `pip install --no-deps"):
        init_session(SessionOptions(bigdl=True))
    monkeypatch.setattr(session, "find_jars", lambda: [Path("a.jar")])
    monkeypatch.setattr(session, "_spark_major", lambda: 4)
    with pytest.raises(SessionError, match=r"Scala 2\.12 and load on Spark 3 only"):
        init_session(SessionOptions(bigdl=True))


def test_secret_settings_reach_spark_past_the_command_line(run_python: RunPython) -> None:
    code = """
import psutil
from deeprec_spark.session import SessionOptions, init_session

spark = init_session(SessionOptions({
    "spark.master": "local[1]", "spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1",
    "spark.app.name": "openly", "spark.hadoop.fs.s3a.secret.key": "hush",
}, bigdl=False))
running = [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]
lines = [" ".join(process.cmdline()) for process in running]
assert any("openly" in line for line in lines)
assert not any("hush" in line for line in lines), lines
assert spark.sparkContext.getConf().get("spark.hadoop.fs.s3a.secret.key") == "hush"
assert spark.sparkContext._jsc.hadoopConfiguration().get("fs.s3a.secret.key") == "hush"
assert spark.range(3).count() == 3
spark.stop()
"""
    run_python(code, timeout=120)
