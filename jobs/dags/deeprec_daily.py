"""Airflow DAG, once a day: prepare → train → evaluate → export.

Put this file (or a copy) into the DAGs folder of Airflow 3. It imports nothing but Airflow: each task runs the command
line of the environment that has deeprec-spark, so the two environments never meet; its exit code decides. `evaluate`
fails below `evaluation.min_auc` of the job's YAML, and then nothing is exported. A failure is tried again once, a wrong
configuration (exit code 2) is not.

Each day writes its own prepared data and model; training goes on from the checkpoint of the day before.

Set on the Airflow side (environment, or the parameters of a run):
    DEEPREC_HOME      folder in which the tasks run, and that relative paths start from, those in the YAML too;
                      by default the current directory of the Airflow process that reads this file: set it where
                      scheduler and workers are started in different ones (environment only)
    DEEPREC_COMMAND   the program, `deeprec-spark` by default; may be its full path
    DEEPREC_CONF      the job's YAML, `conf/criteo.yaml` by default
    DEEPREC_OUT       folder or URI that all tasks reach, `out/daily` by default
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pendulum
from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG, Param
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

EXIT_CONFIG = 2  # of deeprec-spark: the configuration is wrong, nothing was started
HOME = Path(os.environ.get("DEEPREC_HOME") or Path.cwd()).expanduser().absolute()

# Values come in through the environment, never through the text of the script: no value can become a command.
SCRIPT = """\
exec "$DEEPREC_COMMAND" {step} --conf "$DEEPREC_CONF" \
  --set "data.prepared=$DEEPREC_OUT/$DEEPREC_DAY/prepared" \
  --set "training.model_dir=$DEEPREC_OUT/model_dir" \
  --set "export.path=$DEEPREC_OUT/$DEEPREC_DAY/model"
"""


def absolute(path: str) -> str:
    """The path from HOME on; a URI as it is."""
    return path if "://" in path else str(HOME / Path(path).expanduser())


class StepOperator(BashOperator):
    """A step in HOME; without retries where the configuration is wrong: it would be as wrong in five minutes."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(skip_on_exit_code=EXIT_CONFIG, cwd=str(HOME), **kwargs)

    def execute(self, context: Any) -> Any:
        """Run the step; BashOperator tells the one exit code from all others by skipping."""
        try:
            return super().execute(context)
        except AirflowSkipException as error:
            raise AirflowFailException(
                "The configuration is wrong; the log above names the key. "
                f"Received: conf={context['params']['conf']!r}, exit code {EXIT_CONFIG}"
            ) from error


def task(step: str) -> StepOperator:
    """The task of one step."""
    return StepOperator(
        task_id=step,
        bash_command=SCRIPT.format(step=step),
        env={
            "DEEPREC_COMMAND": "{{ params.command }}",
            "DEEPREC_CONF": "{{ params.conf }}",
            "DEEPREC_OUT": "{{ params.out }}",
            "DEEPREC_DAY": "{{ ds }}",
        },
        append_env=True,
    )


with DAG(
    dag_id="deeprec_daily",
    description="Features, training, evaluation and export of a recommendation model, once a day",
    schedule="@daily",
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    catchup=False,
    max_active_runs=1,  # days share the checkpoints
    default_args={"retries": 1, "retry_delay": timedelta(minutes=5)},
    params={
        "command": Param(os.environ.get("DEEPREC_COMMAND", "deeprec-spark"), type="string"),
        "conf": Param(absolute(os.environ.get("DEEPREC_CONF", "conf/criteo.yaml")), type="string"),
        "out": Param(absolute(os.environ.get("DEEPREC_OUT", "out/daily")), type="string"),
    },
    tags=["deeprec-spark"],
) as dag:
    prepare, train, evaluate, export = map(task, ("prepare", "train", "evaluate", "export"))
    prepare >> train >> evaluate >> export
