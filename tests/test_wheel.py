"""The wheel, installed into a clean environment with no checkout on the path, runs the quick start."""

from __future__ import annotations

import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.environments import clean_env, uv

pytestmark = [pytest.mark.wheel, pytest.mark.timeout(900)]


def test_what_is_in_the_wheel(built_wheel: Path) -> None:
    names = zipfile.ZipFile(built_wheel).namelist()
    for wanted in (
        "deeprec_spark/jobs/train.py",
        "deeprec_spark/jobs/dags/deeprec_daily.py",
        "deeprec_spark/udfs/__init__.py",
        "deeprec_spark/embedding/store.py",
        "deeprec_spark/conf/movielens.yaml",
        "deeprec_spark/conf/log4j2.properties",
        "deeprec_spark/py.typed",
    ):
        assert wanted in names
    assert any(name.startswith("deeprec_spark/embedding/_core.") and name.endswith(".so") for name in names)
    tops = {name.split("/")[0] for name in names}
    assert tops == {"deeprec_spark", next(top for top in tops if top.endswith(".dist-info"))}


def test_the_quick_start_runs_from_the_wheel(built_wheel: Path, tmp_path: Path) -> None:
    """As a plain user would install it: the wheel and what it depends on, nothing of this checkout, no BigDL."""
    place = tmp_path / "env"
    python = place / "bin" / "python"
    uv("venv", "--quiet", str(place))
    uv(
        "pip",
        "install",
        "--quiet",
        "--python",
        str(python),
        "-c",
        str(ROOT / "requirements/lock.txt"),
        str(built_wheel),
    )
    script = shutil.copy(ROOT / "notebooks" / "quickstart.py", tmp_path / "quickstart.py")
    env = clean_env(
        QUICKSTART_DIR=str(tmp_path / "work"), QUICKSTART_ROWS="4000", PATH=f"{place / 'bin'}:/usr/bin:/bin"
    )
    done = subprocess.run(
        [str(python), script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    assert "'auc'" in done.stdout
    found = subprocess.run(
        [str(python), "-c", "import deeprec_spark; print(deeprec_spark.__file__)"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.startswith(str(place))
    jobs = subprocess.run(
        [str(place / "bin" / "deeprec-spark"), "conf"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "movielens" in jobs.stdout
    _bigdl_as_the_readme_says(python, built_wheel, env, tmp_path)


FRIESIAN = """
from bigdl.friesian.feature import FeatureTable
from deeprec_spark.session import SessionOptions, init_session
spark = init_session(SessionOptions(conf={"spark.master": "local[1]", "spark.ui.enabled": "false"}, bigdl=True))
table = FeatureTable(spark.createDataFrame([(1, None), (2, 5)], "a int, b int")).fillna(7, ["b"])
print(sorted(row["b"] for row in table.df.collect()))
"""


def _bigdl_as_the_readme_says(python: Path, wheel: Path, env: dict[str, str], work: Path) -> None:
    """The two pip lines of the README, word for word, then one of Friesian's JVM operators."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8").split("### BigDL")[1]
    lines = re.findall(r"^    pip install (.*)$", readme, flags=re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        words = [word.strip("'").replace("dist/deeprec_spark-*.whl", str(wheel)) for word in line.split()]
        uv(
            "pip",
            "install",
            "--quiet",
            "--python",
            str(python),
            "-c",
            str(ROOT / "requirements/lock.txt"),
            *words,
        )
    done = subprocess.run(
        [str(python), "-c", FRIESIAN],
        cwd=work,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    assert done.stdout.splitlines()[-1] == "[5, 7]"
