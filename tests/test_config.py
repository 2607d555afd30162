"""The job's YAML: what is right is read, what is wrong is named by its path, with a remedy."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import yaml

from deeprec_spark.config import ConfigError, JobConfig, load_config, parse_config
from deeprec_spark.embedding.optimizers import Adagrad
from deeprec_spark.platform import reference, resources
from deeprec_spark.recovery import RestartOptions
from deeprec_spark.runtime.options import DeadlineOptions
from deeprec_spark.runtime.transport import TlsOptions
from deeprec_spark.saving import CheckpointOptions
from tests.conftest import ROOT

MINIMAL: dict[str, Any] = {
    "data": {"kind": "movielens", "path": "ml-100k", "prepared": "out/prepared"},
    "training": {"model_dir": "out/model_dir"},
    "export": {"path": "out/model"},
}


def test_a_minimal_job_has_defaults() -> None:
    config = parse_config(MINIMAL)
    assert (config.cluster.num_ps, config.cluster.workers, config.cluster.mode) == (0, 1, "async")
    assert config.model.name == "deepfm"
    assert config.training.make_sparse_optimizer() == Adagrad(learning_rate=0.05)


def test_saving_restarts_and_deadlines_are_the_estimators_unless_told_otherwise() -> None:
    config = parse_config(MINIMAL)
    assert config.training.checkpoints.make_options() == CheckpointOptions()
    assert config.training.restarts.make_options() == RestartOptions()
    assert config.cluster.deadlines.make_options() == DeadlineOptions()
    config = parse_config(
        MINIMAL,
        [
            "training.checkpoints={save_secs: null, incremental_steps: 50, keep_max: 5}",
            "training.restarts.max_restarts=7",
            "cluster.deadlines.heartbeat_secs=5",
        ],
    )
    options = CheckpointOptions(save_secs=None, incremental_steps=50, keep_max=5)
    assert config.training.checkpoints.make_options() == options
    assert config.training.restarts.make_options().max_restarts == 7
    assert config.cluster.deadlines.make_options() == DeadlineOptions(heartbeat_secs=5.0)
    with pytest.raises(ConfigError, match=r"training\.checkpoints\.save_secs.*-1"):
        parse_config(MINIMAL, ["training.checkpoints.save_secs=-1"])


@pytest.mark.parametrize("name", resources.conf_names())
def test_every_job_file_that_ships_is_valid(name: str) -> None:
    assert isinstance(parse_config(yaml.safe_load(resources.read_conf(name))), JobConfig)


def test_there_are_job_files() -> None:
    assert resources.conf_names() == ["criteo", "movielens", "synthetic"]


def test_dump_and_read_again() -> None:
    config = parse_config(MINIMAL, ["training.optimizer={name: adam, beta_1: 0.8}"])
    again = parse_config(config.model_dump(mode="json"))
    assert again == config
    assert again.training.optimizer.arguments == {"beta_1": 0.8}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "training.epoks=2",
            r"training\.epoks: unknown key; did you mean 'epochs'\? Known: model_dir, .*Received: 2",
        ),
        ("nonsense=1", r"nonsense: unknown key; Known: name, data"),
        ("cluster.numps=1", r"cluster\.numps: unknown key; did you mean 'num_ps'\?"),
        (
            "training.early_stopping.patients=1",
            r"training\.early_stopping\.patients: unknown key; .*'patience'",
        ),
        ("training.epochs=0", r"training\.epochs: .*greater than or equal to 1.*Received: 0"),
        ("training.epochs=many", r"training\.epochs: .*integer.*Received: 'many'"),
        ("data.kind=netflix", r"data\.kind: .*'movielens'.*Received: 'netflix'"),
        ("data.path=", r"data: kind 'movielens' reads files: add path"),
        ("data.test_fraction=1.5", r"data\.test_fraction: .*less than 1"),
        ("model.name=resnet", r"model\.name: .*deepfm.*Received: 'resnet'"),
        ("model.options.hiden_units=[8]", r"model\.options\.hiden_units: unknown key; .*'hidden_units'"),
        (
            "model.options.embeding_dim=4",
            r"model\.options\.embeding_dim: unknown key; did you mean 'embedding_dim'\? Known: .*Received: 4",
        ),
        ("model.options.embedding_dim=0", r"model\.options\.embedding_dim: .*Received: 0"),
        ("model.options.hidden_units=[8, x]", r"model\.options\.hidden_units\.1: .*Received: 'x'"),
        (
            "training.sparse_optimizer.name=adagard",
            r"training\.sparse_optimizer\.name: .*adagrad.*Received: 'adagard'",
        ),
        (
            "training.sparse_optimizer={name: sgd, momentun: 0.9}",
            r"training\.sparse_optimizer\.momentun: unknown key; did you mean 'momentum'\? .*Received: 0\.9",
        ),
        ("training.optimizer.name=adm", r"training\.optimizer\.name: .*adamw.*Received: 'adm'"),
        (
            "training.sparse_optimizer={name: sgd, momentum: 2}",
            r"training\.sparse_optimizer: SGD\.momentum .*Received",
        ),
        ("training.optimizer={name: adam, beta: 1}", r"training\.optimizer\.beta: .*beta_1.*Received: 1"),
        (
            "training.optimizer={name: adam, lr: 0.1}",
            r"training\.optimizer\.lr: unknown key; Known: name, learning_rate, .*Received: 0\.1",
        ),
        ("training.optimizer={name: adam, clipnorm: 1, clipvalue: 1}", r"training\.optimizer: .*Received"),
        ("training.early_stopping={monitor: val_auc}", r"training: .*validate_each_epoch: true"),
        ("cluster.workers=2", r"cluster: num_ps: 0 .*placement: colocated. Received: workers=2"),
        ("cluster={placement: colocated, num_ps: 1}", r"cluster: .*set num_ps: 0. Received: num_ps=1"),
        ("cluster.mode=fast", r"cluster\.mode: .*'async' or 'sync'.*Received: 'fast'"),
        ("export={}", r"export\.path: is needed and missing"),
    ],
)
def test_a_wrong_key_is_named_with_a_remedy(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(MINIMAL, [override])


@pytest.mark.parametrize(
    "override", ["training.epoks=2", "cluster.workers=2", "training.sparse_optimizer.name=adagard"]
)
def test_a_plain_mistake_is_answered_without_keras(run_python: Any, override: str) -> None:
    code = f"""
import sys
from deeprec_spark.config import ConfigError, parse_config
try:
    parse_config({MINIMAL!r}, [{override!r}])
except ConfigError as error:
    print(error)
print([name for name in ("keras", "tensorflow") if name in sys.modules])
"""
    lines = run_python(code).stdout.splitlines()
    assert lines[0] == "config: 1 problem(s)"
    assert lines[-1] == "[]"


def test_every_problem_is_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(MINIMAL, ["training.epoks=2", "cluster.mode=fast", "export.pth=x"])
    assert str(caught.value).startswith("config: 3 problem(s)")


@pytest.mark.parametrize(
    "override", ["training.epochs", "=3", "training..epochs=3", "training.model_dir.x=3"]
)
def test_an_override_that_is_none(override: str) -> None:
    with pytest.raises(ConfigError, match="override"):
        parse_config(MINIMAL, [override])


def test_overrides_do_not_change_what_they_are_applied_to() -> None:
    parse_config(MINIMAL, ["training.epochs=5"])
    assert "epochs" not in MINIMAL["training"]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file.*Received: path='.*none\.yaml'"):
        load_config(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("data: [1, 2")
    with pytest.raises(ConfigError, match=r"broken\.yaml is not YAML: (.|\n)*line 1"):
        load_config(broken)
    broken.write_text("just text")
    with pytest.raises(ConfigError, match="must hold sections"):
        load_config(broken)


def test_the_reference_page_is_that_of_the_models(tmp_path: Path) -> None:
    reference.main([str(tmp_path / "configuration.md")])
    written = (tmp_path / "configuration.md").read_text(encoding="utf-8")
    assert written == (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8"), (
        "run: python -m deeprec_spark.platform.reference docs/configuration.md"
    )
    assert "| num_ps | `int` | `0` | Parameter servers" in written


def test_certificates_and_limits_reach_the_cluster() -> None:
    overrides = ["cluster.tls={certificate: a.pem, private_key: a.key, ca_certificate: ca.pem}"]
    config = parse_config(MINIMAL, [*overrides, "cluster.max_message_mb=64"])
    assert config.cluster.tls is not None
    assert config.cluster.tls.make_options() == TlsOptions("a.pem", "a.key", "ca.pem")
    assert config.cluster.max_message_mb == 64
    assert parse_config(MINIMAL).cluster.tls is None
    with pytest.raises(ConfigError, match=r"cluster\.tls\.private_key: is needed and missing"):
        parse_config(MINIMAL, ["cluster.tls={certificate: a.pem}"])
    with pytest.raises(
        ConfigError, match=r"cluster\.max_message_mb: .*less than or equal to 2047.*Received: 4096"
    ):
        parse_config(MINIMAL, ["cluster.max_message_mb=4096"])


def test_secrets_are_neither_dumped_nor_quoted(tmp_path: Path) -> None:
    conf = {"spark.hadoop.fs.s3a.secret.key": "hush", "spark.executor.memory": "2g"}
    config = parse_config({**MINIMAL, "cluster": {"conf": conf}})
    assert config.cluster.conf == conf
    text = yaml.safe_dump(config.model_dump(mode="json"))
    assert "hush" not in text
    assert "2g" in text
    assert "hush" not in config.model_dump_json()
    away = "training.model_dir=s3://AKIA:hush@bucket/m?secret_key=hush"
    dumped = parse_config(MINIMAL, [away]).model_dump(mode="json")
    assert dumped["training"]["model_dir"] == "s3://AKIA:*****@bucket/m?secret_key=*****"
    wrong: dict[str, Any] = {"spark.hadoop.fs.s3a.secret.key": ["hush"]}
    with pytest.raises(ConfigError, match=r"cluster\.conf\.spark.*Received: '\*+'") as caught:
        parse_config({**MINIMAL, "cluster": {"conf": wrong}})
    assert "hush" not in "".join(traceback.format_exception(caught.value))
    file = tmp_path / "job.yaml"
    file.write_text("cluster:\n  conf:\n    spark.hadoop.fs.s3a.secret.key: hush: hush\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not YAML") as caught:
        load_config(file)
    assert "hush" not in "".join(traceback.format_exception(caught.value))
