"""Secrets are masked in texts and settings; all else stays as it is."""

from __future__ import annotations

import pytest

from deeprec_spark.redaction import is_secret, redact, redact_settings, redacted
from deeprec_spark.session import SessionOptions


@pytest.mark.parametrize(
    "key",
    [
        "spark.hadoop.fs.s3a.secret.key",
        "spark.hadoop.fs.s3a.access.key",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "spark.hadoop.fs.azure.account.key.x.dfs.core.windows.net",
        "fs.azure.sas.fixed.token",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "spark.ssl.keyStorePassword",
        "private_key",
        "AccountKey",
        "hf_api_key",
        "apikey",
        "sig",
        "db.pwd",
        "connection_string",
        "spark.io.encryption.key",
    ],
)
def test_names_of_secrets(key: str) -> None:
    assert is_secret(key)


@pytest.mark.parametrize(
    "key",
    ["spark.executor.memory", "spark.sql.shuffle.partitions", "learning_rate", "key", "signal", "design"],
)
def test_names_of_other_settings(key: str) -> None:
    assert not is_secret(key)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://AKIA:hush@b/x", "s3://AKIA:*****@b/x"),
        ("at 's3a://AKIA:hu/sh@b/x'", "at 's3a://AKIA:hu/sh@b/x'"),
        ("abfs://:hush@account.blob/x,y", "abfs://:*****@account.blob/x,y"),
        ("s3://b/x?access_key=hush&region=a", "s3://b/x?access_key=*****&region=a"),
        (
            "s3://b?region=a&session_token=hush&secret_key=hush",
            "s3://b?region=a&session_token=*****&secret_key=*****",
        ),
        ("abfs://c@account.dfs.core.windows.net/x", "abfs://c@account.dfs.core.windows.net/x"),
        ("abfs://c@a.dfs/x?sv=2020&sig=hush", "abfs://c@a.dfs/x?sv=2020&sig=*****"),
        ("hf://x?hf_api_key=hush", "hf://x?hf_api_key=*****"),
        ("Protocol=https;AccountKey=hu/sh==;Suffix=x", "Protocol=https;AccountKey=*****;Suffix=x"),
        ("hdfs://host:9000/a@b", "hdfs://host:9000/a@b"),
        ("spark://127.0.0.1:7077 tokens: 12", "spark://127.0.0.1:7077 tokens: 12"),
        ("step 12, hush and hush", "step 12, ***** and *****"),
    ],
)
def test_redact(text: str, expected: str) -> None:
    assert redact(text, ["hush"] if "step" in text else ["", "nothing"]) == expected


def test_settings() -> None:
    settings = {"spark.hadoop.fs.s3a.secret.key": "hush", "spark.x": "s3://a:hush@b", "spark.y": "2g"}
    masked = {"spark.hadoop.fs.s3a.secret.key": "*****", "spark.x": "s3://a:*****@b", "spark.y": "2g"}
    assert redacted(settings) == masked
    assert "hush" not in repr(SessionOptions(settings))
    assert "2g" in repr(SessionOptions(settings))


@pytest.mark.parametrize(
    "text", ["  secret.key: hush", "{password: 'hush', a: 1}", 'token = "hush"', "x_token=hush, b"]
)
def test_redact_settings(text: str) -> None:
    assert "hush" not in redact_settings(text)


@pytest.mark.parametrize("sign", ["|", ">-", ">", "|2"])
def test_values_of_several_lines_are_masked_and_no_more(sign: str) -> None:
    text = f"conf:\n  secret.key: {sign}\n    hush\n\n    hush\n  a: b\nlast: c\n"
    assert redact_settings(text) == f"conf:\n  secret.key: {sign}\n    *****\n  a: b\nlast: c\n"
