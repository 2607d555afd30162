"""The daily DAG on a real Airflow 3, in an environment of its own, driving this project's command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.environments import clean_env, environment

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(900)]

RUN = """
import json, sys
from deeprec_daily import dag
run = dag.test(run_conf=json.loads(sys.argv[1]))
tasks = {task.task_id: str(task.state) for task in run.get_task_instances()}
defaults = {name: dag.params[name] for name in ("conf", "out")}
print("RESULT", json.dumps({"run": str(run.state), "tasks": tasks, "defaults": defaults}))
"""


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Airflow's Python and an environment with an empty metadata database."""
    python = environment(ROOT / ".venv-airflow", ROOT / "requirements" / "airflow.txt")
    home = tmp_path_factory.mktemp("airflow")
    env = clean_env(
        AIRFLOW_HOME=str(home),
        AIRFLOW__CORE__LOAD_EXAMPLES="False",
        AIRFLOW__CORE__DAGS_FOLDER=str(ROOT / "jobs" / "dags"),
        AIRFLOW__DATABASE__SQL_ALCHEMY_CONN=f"sqlite:///{home}/airflow.db",
        AIRFLOW__LOGGING__LOGGING_LEVEL="WARNING",
        PYTHONPATH=str(ROOT / "jobs" / "dags"),
        SPARK_LOCAL_IP="127.0.0.1",
    )
    command = [str(python), "-m", "airflow", "db", "migrate"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return python, env


def run_dag(airflow: tuple[Path, dict[str, str]], tmp_path: Path, **overrides: object) -> dict[str, object]:
    """One run of the DAG on a small generated job; states of the run and of its tasks."""
    python, env = airflow
    job = tmp_path / "job.yaml"
    job.write_text(
        json.dumps(
            {
                "data": {"kind": "synthetic", "rows": 3000, "prepared": "set by the DAG"},
                "model": {"name": "deepfm", "options": {"embedding_dim": 4, "hidden_units": [8]}},
                "training": {"model_dir": "set by the DAG", "batch_size": 256},
                "export": {"path": "set by the DAG"},
                **overrides,
            }
        )
    )
    # Relative: from DEEPREC_HOME on.
    params = {"command": str(Path(sys.executable).parent / "deeprec-spark"), "conf": "job.yaml", "out": "out"}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    script = tmp_path / "run.py"
    script.write_text(RUN)
    done = subprocess.run(
        [str(python), str(script), json.dumps(params)],
        cwd=elsewhere,
        env={**env, "DEEPREC_HOME": str(tmp_path), "DEEPREC_OUT": "hdfs://host/daily"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT {") and '"tasks"' in line]
    assert lines, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    states: dict[str, object] = json.loads(lines[-1][6:])
    return states


def test_a_day_ends_with_a_model(airflow: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    states = run_dag(airflow, tmp_path)
    assert states == {
        "run": "success",
        "tasks": dict.fromkeys(("prepare", "train", "evaluate", "export"), "success"),
        "defaults": {"conf": str(tmp_path / "conf" / "criteo.yaml"), "out": "hdfs://host/daily"},
    }
    (model,) = (tmp_path / "out").glob("*/model/saved_model.pb")
    day = model.parent.parent.name
    assert len(day) == 10
    assert (tmp_path / "out" / day / "prepared" / "feature_spec.json").is_file()


def test_a_configuration_error_stops_the_day_at_once(
    airflow: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    states = run_dag(airflow, tmp_path, evaluation={"min_auk": 0.5})
    tasks = states["tasks"]
    assert isinstance(tasks, dict)
    assert states["run"] == "failed"
    assert tasks["prepare"] == "failed"  # with retries left: else it would be up_for_retry for five minutes
    assert not (tmp_path / "out").exists()
