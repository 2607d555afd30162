"""A real job with TLS: strangers are turned away while it runs, and its secrets appear nowhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from deeprec_spark.platform.standalone import StandaloneCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

TOKEN = "job-token-that-nobody-may-read"
STORAGE_KEY = "storage-key-that-nobody-may-read"

DRIVER = """
import json, os, secrets, sys
import keras, numpy as np, psutil
from pathlib import Path
from deeprec_spark.runtime.errors import ConnectionLostError, RemoteError
from deeprec_spark.runtime.channel import Channel
from deeprec_spark.runtime.messages import Message
from deeprec_spark.runtime.transport import Connection, TlsOptions, split_address

master, folder = sys.argv[1], Path(sys.argv[2])
token, storage_key = sys.stdin.read().split()
secrets.token_urlsafe = lambda size: token  # what the job will take as its own

from deeprec_spark.embedding.optimizers import SGD
from deeprec_spark.estimator import Estimator
from deeprec_spark.layers import SparseEmbedding
from deeprec_spark.session import SessionOptions, init_session

(folder / "events").mkdir()
spark = init_session(SessionOptions({
    "spark.master": master, "spark.cores.max": "2", "spark.executor.cores": "1", "spark.executor.instances": "2",
    "spark.executor.memory": "512m", "spark.ui.enabled": "false", "spark.sql.shuffle.partitions": "2",
    "spark.driver.host": "127.0.0.1", "spark.eventLog.enabled": "true",
    "spark.eventLog.dir": (folder / "events").as_uri(),
    "spark.hadoop.fs.s3a.secret.key": storage_key,
    "spark.executorEnv.AWS_SECRET_ACCESS_KEY": storage_key,
    "spark.executorEnv.DEEPREC_TEST_FOLDER": str(folder),
}, bigdl=False))
tls = TlsOptions(*(str(folder / name) for name in ("node.pem", "node.key", "ca.pem")))

def creator(config):
    a = keras.Input((), dtype="int64", name="a")
    model = keras.Model({"a": a}, keras.layers.Dense(1, activation="sigmoid")(SparseEmbedding(4, name="ta")(a)))
    model.compile("sgd", "binary_crossentropy")
    return model

found = {"processes": []}

def ports():
    "Where driver and nodes listen for calls: theirs speak TLS."
    return sorted({
        connection.laddr.port
        for process in [psutil.Process(), *nodes()]
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    })

def nodes():
    return [
        process for process in psutil.process_iter(["cmdline"])
        if "deeprec_spark.runtime.node" in (process.info["cmdline"] or [])
        and process.environ().get("DEEPREC_TEST_FOLDER") == str(folder)
    ]

def outcome(address, token, tls):
    "What a stranger hears who speaks as workers do to servers, or else as nodes do to the coordinator."
    found = {attempt(kind, address, token, tls) for kind in (Channel, Connection)}
    return min(found, key=("answered", "PermissionError", "ConnectionLostError", "RemoteError").index)

def attempt(kind, address, token, tls):
    connection = kind(address, token=token, tls=tls, timeout=10)
    try:
        connection.call("statistics", Message())
        return "answered"
    except ValueError:
        return "answered"
    except (PermissionError, ConnectionLostError, RemoteError) as error:
        return type(error).__name__
    except TimeoutError:  # each waits for the other to begin
        return "ConnectionLostError"
    finally:
        connection.close()

class Look(keras.callbacks.Callback):
    "While the job runs: try every port as a stranger, and read what `ps` shows of all processes."
    def on_train_batch_end(self, batch, logs=None):
        if found["processes"]:
            return
        other = TlsOptions(ca_certificate=str(folder / "other-ca.pem"))
        found["ports"] = {
            port: [
                outcome(f"127.0.0.1:{port}", token, tls),
                outcome(f"127.0.0.1:{port}", "wrong", tls),
                outcome(f"127.0.0.1:{port}", token, other),
                outcome(f"127.0.0.1:{port}", token, None),
            ]
            for port in ports()
        }
        for process in psutil.process_iter():
            try:
                line, environment = process.cmdline(), process.environ()
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            text = " ".join(line)
            seen = [name for name, secret in (("token", token), ("key", storage_key)) if secret in text]
            held = [name for name, value in environment.items() if token in value]
            if process in nodes() or seen or held:
                found["processes"].append([text[:300], seen, held])

rows = spark.range(4000).selectExpr("id % 97 as a", "cast(id % 2 as int) as y")
rows.write.parquet(str(folder / "data"))
estimator = Estimator.from_keras(
    model_creator=creator, num_ps=1, num_workers=1, sparse_optimizer=SGD(0.1), tls=tls, spark=spark,
    model_dir=str(folder / "model_dir"),
)
estimator.fit(str(folder / "data"), 1, 8, callbacks=[Look()], feature_cols=["a"], label_cols=["y"], verbose=0)
found["rows"] = estimator.statistics.rows

def failing(config):
    from deeprec_spark.quiet import import_tensorflow
    if "AWS_SECRET_ACCESS_KEY" in os.environ:  # on a worker
        raise ValueError(f"cannot read s3://AKIA:{os.environ['AWS_SECRET_ACCESS_KEY']}@bucket/x")
    return creator(config)

try:
    estimator = Estimator.from_keras(
        model_creator=failing, num_ps=1, num_workers=1, sparse_optimizer=SGD(0.1), spark=spark, tls=tls
    )
    estimator.fit(str(folder / "data"), 1, 8, feature_cols=["a"], label_cols=["y"], verbose=0)
except Exception as error:
    found["error"] = str(error)
print("FOUND " + json.dumps(found), flush=True)
spark.stop()
"""


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities, and a certificate of the first for this host."""
    place = tmp_path_factory.mktemp("tls")
    for name in ("ca", "other-ca"):
        subject = (
            "-subj",
            f"/CN={name}",
            "-days",
            2,
            "-keyout",
            place / f"{name}.key",
            "-out",
            place / f"{name}.pem",
        )
        openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject)
    openssl(
        *("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=node"),
        *("-keyout", place / "node.key", "-out", place / "node.csr"),
    )
    (place / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    openssl(
        *("x509", "-req", "-in", place / "node.csr", "-CA", place / "ca.pem", "-CAkey", place / "ca.key"),
        *("-CAcreateserial", "-days", 2, "-extfile", place / "names", "-out", place / "node.pem"),
    )
    (place / "node.key").chmod(0o600)
    return place


@pytest.fixture(scope="module")
def run(spark_cluster: StandaloneCluster, folder: Path) -> tuple[dict[str, Any], str]:
    """What the driver found, and all that it wrote to its log."""
    script = folder / "driver.py"
    script.write_text(DRIVER, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script), spark_cluster.master_url, str(folder)],
        input=f"{TOKEN} {STORAGE_KEY}",
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-8000:]
    return json.loads(done.stdout.split("FOUND ", 1)[1].splitlines()[0]), log


def test_a_job_with_tls_trains(run: tuple[dict[str, Any], str]) -> None:
    assert run[0]["rows"] == 4000


def test_strangers_are_turned_away_on_every_port(run: tuple[dict[str, Any], str]) -> None:
    answers = list(run[0]["ports"].values())
    refused = ("ConnectionLostError", "RemoteError")
    ours = [answer for answer in answers if answer[0] == "answered"]
    assert len(ours) == 2, answers  # the coordinator and the server
    for right, wrong_token, other_authority, plain in ours:
        assert (right, wrong_token) == ("answered", "PermissionError")
        assert other_authority in refused
        assert plain in refused


def test_no_process_shows_a_secret(run: tuple[dict[str, Any], str]) -> None:
    assert len(run[0]["processes"]) == 2
    for line, on_command_line, in_environment in run[0]["processes"]:
        assert "deeprec_spark.runtime.node" in line
        assert (on_command_line, in_environment) == ([], [])


def test_no_file_and_no_error_holds_a_secret(
    run: tuple[dict[str, Any], str], spark_cluster: StandaloneCluster, folder: Path
) -> None:
    found, log = run
    assert "cannot read s3://AKIA:*****@bucket/x" in found["error"]
    key = (folder / "node.key").read_text().splitlines()[1]
    secrets = [secret.encode() for secret in (TOKEN, STORAGE_KEY, key)]
    texts = {"the driver's log": log.encode(), "the error": found["error"].encode()}
    own = {folder / name for name in ("node.key", "ca.key", "other-ca.key")}
    for root in (folder, spark_cluster.directory):
        texts |= {
            str(file): file.read_bytes() for file in root.rglob("*") if file.is_file() and file not in own
        }
    kinds = {Path(name).name for name in texts}
    assert {"stderr", "manifest.json", "master.log"} <= kinds
    assert any("events" in name for name in texts)
    for name, text in texts.items():
        for secret in secrets:
            assert secret not in text, name
