"""Files that come with the package: job configurations and the log4j2 settings."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

_PACKAGE = "deeprec_spark.conf"


def conf_names() -> list[str]:
    """The job files that `deeprec-spark conf` prints."""
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in resources.files(_PACKAGE).iterdir()
        if entry.name.endswith(".yaml")
    )


def read_conf(name: str) -> str:
    """The text of one of them."""
    return (resources.files(_PACKAGE) / f"{name}.yaml").read_text(encoding="utf-8")


def log4j2_path() -> Path:
    """The log4j2 settings that keep Spark's own logging short."""
    with resources.as_file(resources.files(_PACKAGE) / "log4j2.properties") as path:
        return path
