"""The thin slice on pyspark 4, where BigDL cannot be: the same Estimator, on parameter server and workers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.environments import clean_env, environment, uv

pytestmark = [pytest.mark.spark4, pytest.mark.timeout(900)]

SLICE = """
import json, sys
import pyspark
from deeprec_spark.config import load_config
from deeprec_spark.jobs.evaluate import evaluate
from deeprec_spark.jobs.export import export
from deeprec_spark.jobs.predict import predict
from deeprec_spark.jobs.prepare_features import prepare
from deeprec_spark.jobs.train import train
from deeprec_spark.session import init_session

try:
    import bigdl
    raise SystemExit("BigDL must not be here")
except ModuleNotFoundError:
    pass
config = load_config(sys.argv[1])
spark = init_session({"spark.master": "local[3]", **config.cluster.conf})
results = {job.__name__: job(spark, config) for job in (prepare, train, evaluate, export, predict)}
print("RESULT", json.dumps({"spark": spark.version, **results}))
spark.stop()
"""


def test_the_slice_runs_on_spark_4(built_wheel: Path, tmp_path: Path) -> None:
    python = environment(ROOT / ".venv-spark4", ROOT / "requirements" / "spark4.txt")
    uv("pip", "install", "--quiet", "--python", str(python), "--no-deps", "--reinstall", str(built_wheel))
    job = tmp_path / "job.yaml"
    job.write_text(
        json.dumps(
            {
                "data": {"kind": "synthetic", "rows": 4000, "prepared": str(tmp_path / "prepared")},
                "model": {"name": "deepfm", "options": {"embedding_dim": 4, "hidden_units": [8]}},
                "training": {"model_dir": str(tmp_path / "model_dir"), "batch_size": 256},
                "cluster": {"num_ps": 1, "workers": 2, "conf": {"spark.ui.enabled": "false"}},
                "export": {"path": str(tmp_path / "model")},
            }
        )
    )
    script = tmp_path / "slice.py"
    script.write_text(SLICE)
    done = subprocess.run(
        [str(python), str(script), str(job)],
        cwd=tmp_path,
        env=clean_env(SPARK_LOCAL_IP="127.0.0.1"),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))[6:])
    assert result["spark"] == "4.3.0"
    assert result["train"]["rows"] == result["prepare"]["train_rows"]
    assert result["predict"]["rows"] == result["prepare"]["test_rows"]
    assert 0.4 < result["evaluate"]["auc"] < 1
    assert (tmp_path / "model" / "saved_model.pb").is_file()
