"""Airflow DAG, once a day: prepare → train → evaluate → export.

Put this file (or a copy) into the DAGs folder of Airflow 3. It imports nothing but Airflow: each task runs the command
line of the environment that has deeprec-spark, so the two environments never meet. Exit codes are the contract: a
wrong configuration (2) is not retried, a failure (1) is. `evaluate` fails below `evaluation.min_auc`, and then
nothing is exported.

Set on the Airflow side (environment, or the run's parameters):
    DEEPREC_COMMAND   the program, `deeprec-spark` by default; may be its full path
    DEEPREC_CONF      the job's YAML
    DEEPREC_OUT       folder that all tasks reach; each day gets a subfolder for data and model
"""

from __future__ import annotations

import os
from datetime import timedelta

import pendulum
from airflow.exceptions import AirflowFailException
from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG, Param

EXIT_CONFIG = 2

# Values come in through the environment, never through the text of the script: no value can become a command.
SCRIPT = """\
exec "$DEEPREC_COMMAND" {step} --conf "$DEEPREC_CONF" \
  --set "data.prepared=$DEEPREC_OUT/$DEEPREC_DAY/prepared" \
  --set "training.model_dir=$DEEPREC_OUT/model_dir" \
  --set "export.path=$DEEPREC_OUT/$DEEPREC_DAY/model"
"""


class DeepRecOperator(BashOperator):
    """One step of the job; a configuration error fails the task for good, since a retry would end the same."""

    def __init__(self, *, step: str, **kwargs: object) -> None:
        super().__init__(
            task_id=step,
            bash_command=SCRIPT.format(step=step),
            env={
                "DEEPREC_COMMAND": "{{ params.command }}",
                "DEEPREC_CONF": "{{ params.conf }}",
                "DEEPREC_OUT": "{{ params.out }}",
                "DEEPREC_DAY": "{{ ds }}",
            },
            append_env=True,
            **kwargs,
        )

    def execute(self, context: object) -> object:
        """Run the step."""
        result = self.subprocess_hook.run_command(
            command=["bash", "-c", self.bash_command],
            env=self.get_env(context),
            output_encoding=self.output_encoding,
        )
        if result.exit_code == EXIT_CONFIG:
            raise AirflowFailException(f"{self.task_id}: the configuration is wrong; the log says what")
        if result.exit_code != 0:
            raise RuntimeError(f"{self.task_id} ended with exit code {result.exit_code}; the log says why")
        return result.output


with DAG(
    dag_id="deeprec_daily",
    description="Features, training, evaluation and export of a recommendation model, once a day",
    schedule="@daily",
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    catchup=False,
    max_active_runs=1,  # days share the checkpoints: each goes on from the one before
    default_args={"retries": 1, "retry_delay": timedelta(minutes=5)},
    params={
        "command": Param(os.environ.get("DEEPREC_COMMAND", "deeprec-spark"), type="string"),
        "conf": Param(os.environ.get("DEEPREC_CONF", "conf/criteo.yaml"), type="string"),
        "out": Param(os.environ.get("DEEPREC_OUT", "out/daily"), type="string"),
    },
    tags=["deeprec-spark"],
) as dag:
    prepare, train, evaluate, export = (
        DeepRecOperator(step=step) for step in ("prepare", "train", "evaluate", "export")
    )
    prepare >> train >> evaluate >> export
