"""Airflow DAG, once a day: prepare → train → evaluate → export.

Put this file (or a copy) into the DAGs folder of Airflow 3. It imports nothing but Airflow: each task runs the command
line of the environment that has deeprec-spark, so the two environments never meet; its exit code decides. `evaluate`
fails below `evaluation.min_auc` of the job's YAML, and then nothing is exported.

Each day writes its own prepared data and model; training goes on from the checkpoint of the day before.

Set on the Airflow side (environment, or the parameters of a run):
    DEEPREC_COMMAND   the program, `deeprec-spark` by default; may be its full path
    DEEPREC_CONF      the job's YAML
    DEEPREC_OUT       folder or URI that all tasks reach
"""

from __future__ import annotations

import os
from datetime import timedelta

import pendulum
from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG, Param

# Values come in through the environment, never through the text of the script: no value can become a command.
SCRIPT = """\
exec "$DEEPREC_COMMAND" {step} --conf "$DEEPREC_CONF" \
  --set "data.prepared=$DEEPREC_OUT/$DEEPREC_DAY/prepared" \
  --set "training.model_dir=$DEEPREC_OUT/model_dir" \
  --set "export.path=$DEEPREC_OUT/$DEEPREC_DAY/model"
"""


def task(step: str) -> BashOperator:
    """The task of one step."""
    return BashOperator(
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
        "conf": Param(os.environ.get("DEEPREC_CONF", "conf/criteo.yaml"), type="string"),
        "out": Param(os.environ.get("DEEPREC_OUT", "out/daily"), type="string"),
    },
    tags=["deeprec-spark"],
) as dag:
    prepare, train, evaluate, export = map(task, ("prepare", "train", "evaluate", "export"))
    prepare >> train >> evaluate >> export
