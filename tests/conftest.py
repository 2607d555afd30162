"""Fixtures that all tests share: a local Spark, a real standalone cluster, the shared data, child processes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

# Before anything loads TensorFlow or starts a JVM. Executors must run this interpreter, not the first on PATH.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from deeprec_spark.platform.standalone import StandaloneCluster

# Speed is shown by benchmarks, not by tests that a busy machine fails.
hypothesis.settings.register_profile("no-deadline", deadline=None, print_blob=True)
hypothesis.settings.load_profile("no-deadline")

ROOT = Path(__file__).resolve().parent.parent
RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


# These start several JVMs or make environments: one after another, on one process of `pytest -n 2 --dist loadfile`.
HEAVY = re.compile(r"tests/(cluster/|faults/|test_(airflow|platform_standalone|spark4|wheel)\.py)")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files as units of work, as with loadfile, and all heavy files as one."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "heavy" if HEAVY.match(nodeid) else nodeid.split("::")[0]

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Heavy tests first, so that they do not come last alone."""
    items.sort(key=lambda item: not HEAVY.match(item.nodeid))


def bigdl_jars() -> list[str]:
    """The jars of the installed BigDL, found without importing it."""
    spec = importlib.util.find_spec("bigdl")
    places = list(spec.submodule_search_locations or []) if spec else []
    return sorted(str(jar) for place in places for jar in Path(place).glob("share/*/lib/*.jar"))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One local[2] SparkSession with the BigDL jars for all tests of this process."""
    from pyspark.sql import SparkSession

    home = tmp_path_factory.mktemp("spark")
    conf: Mapping[str, str] = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.memory": "1g",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.default.parallelism": "2",
        "spark.sql.warehouse.dir": str(home / "warehouse"),
        "spark.local.dir": str(home / "scratch"),
        "spark.jars": ",".join(bigdl_jars()),
        "spark.driver.extraClassPath": ":".join(bigdl_jars()),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.driver.extraJavaOptions": (
            f"-Dderby.system.home={home} -Dlog4j2.configurationFile={(ROOT / 'conf/log4j2.properties').as_uri()}"
        ),
    }
    builder = SparkSession.builder.master("local[2]").appName("tests")
    for key, value in conf.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def spark_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneCluster]:
    """A real master and worker with room for three executors of one core; the object itself."""
    from deeprec_spark.platform.standalone import StandaloneCluster

    with StandaloneCluster(
        workers=1, executors=3, directory=tmp_path_factory.mktemp("standalone")
    ) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def standalone_cluster(spark_cluster: StandaloneCluster) -> str:
    """Its master URL. A SparkSession on it belongs into a child process (`run_python`): one JVM, one master."""
    return spark_cluster.master_url


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of shared real data (ml-100k, criteo_sample.csv); the test is skipped where it is absent."""
    place = Path(os.environ.get("DEEPREC_TEST_DATA") or ROOT.parent / "shared" / "data")
    if not place.is_dir():
        pytest.skip(f"no shared data at {place}: set DEEPREC_TEST_DATA")
    return place


@pytest.fixture(scope="session")
def built_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built once for all tests that install it."""
    from tests.environments import build_wheel

    return build_wheel(tmp_path_factory.mktemp("wheel") / "dist")


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Runs Python in a child process: `run_python(code_or_path, *args, env=…, timeout=…, check=True)`.

    `code_or_path` is source text or the Path of a script; the child starts in tmp_path. With `check`, a child
    that fails is an AssertionError with its output.
    """

    def run(
        code: str | Path,
        *args: str,
        env: Mapping[str, str] | None = None,
        timeout: float = 240,
        check: bool = True,
        python: str = sys.executable,
    ) -> subprocess.CompletedProcess[str]:
        if isinstance(code, Path):
            script = code
        else:
            script = tmp_path / "child.py"
            script.write_text(code, encoding="utf-8")
        arguments: dict[str, Any] = {
            "capture_output": True,
            "text": True,
            "timeout": timeout,
            "cwd": tmp_path,
        }
        done = subprocess.run(
            [python, str(script), *args], env={**os.environ, **(env or {})}, check=False, **arguments
        )
        if check and done.returncode != 0:
            raise AssertionError(
                f"{script.name} ended with {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
            )
        return done

    return run
