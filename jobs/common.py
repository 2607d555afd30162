"""What every job does alike: arguments, logging, the Spark session, the result, exit codes."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deeprec_spark.config import ConfigError, JobConfig, load_config
from deeprec_spark.runtime.errors import TerminatedError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

Result = dict[str, Any]
Job = Callable[["SparkSession", JobConfig], Result]


def main(job: Job, description: str, argv: Sequence[str] | None = None) -> int:
    """Run a job from command-line arguments; the exit code says how it went.

    0: done, and the last line of standard output is `RESULT {json}`. 1: the job failed; the error is in the log.
    2: the configuration is wrong, nothing was started. 130: interrupted. 143: SIGTERM; what was trained is saved.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--conf", required=True, metavar="FILE", help="the job's YAML")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override, e.g. training.epochs=2"
    )
    parser.add_argument("--result", metavar="FILE", help="also write the result as JSON here")
    arguments = parser.parse_args(argv)
    return run(job, arguments.conf, arguments.set, arguments.result)


def run(job: Job, conf: str, overrides: Sequence[str] = (), result_file: str | None = None) -> int:
    """Read the configuration, run the job on a session, report its result; returns the exit code."""
    setup_logging()
    try:
        config = load_config(conf, overrides)
    except ConfigError as error:
        logger.error("Configuration: %s", error)
        return EXIT_CONFIG
    return run_config(job, config, result_file)


def run_config(job: Job, config: JobConfig, result_file: str | None = None) -> int:
    """The same with a configuration that is already read."""
    started = time.monotonic()
    try:
        with job_session(config) as spark:
            result = job(spark, config)
    except KeyboardInterrupt:
        logger.warning("Interrupted")
        return EXIT_INTERRUPTED
    except TerminatedError as error:
        logger.warning("%s", error)
        return EXIT_TERMINATED
    except Exception:
        # The one place that catches everything: a scheduler reads the exit code, a person the log.
        logger.exception("The job failed")
        return EXIT_FAILURE
    result = {**result, "seconds": round(time.monotonic() - started, 1)}
    report(result, result_file)
    return EXIT_OK


def report(result: Mapping[str, Any], result_file: str | None = None) -> None:
    """Print `RESULT {json}` on standard output, and write the same JSON to a file when asked."""
    text = json.dumps(_finite(result), allow_nan=False)
    if result_file is not None:
        Path(result_file).parent.mkdir(parents=True, exist_ok=True)
        Path(result_file).write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(f"RESULT {text}\n")
    sys.stdout.flush()


def _finite(value: Any) -> Any:
    """NaN and infinity as null: JSON knows neither, and schedulers parse this."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def setup_logging() -> None:
    """Log lines on standard error, once, quiet about other people's packages; DEEPREC_LOG sets the level."""
    level = os.environ.get("DEEPREC_LOG", "INFO").upper()
    logging.basicConfig(
        stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("deeprec_spark").setLevel(level)


@contextmanager
def job_session(config: JobConfig) -> Iterator[SparkSession]:
    """The session of spark-submit or of a notebook, else one of its own, which is stopped at the end."""
    from pyspark.sql import SparkSession

    from deeprec_spark.session import SessionOptions, init_session

    # The pipelines are plain Spark: no job needs BigDL, whose context takes seconds to attach.
    if SparkSession.getActiveSession() is not None:
        yield init_session(SessionOptions(conf=config.cluster.conf, bigdl=False))
        return
    conf = {**_unless_submitted(config.cluster.conf), "spark.app.name": config.name}
    spark = init_session(SessionOptions(conf=conf, bigdl=False))
    try:
        yield spark
    finally:
        spark.stop()


def _unless_submitted(conf: Mapping[str, str]) -> dict[str, str]:
    """The properties that spark-submit was not given: its command line wins over the file."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return dict(conf)
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()  # connects to spark-submit's JVM, whose properties SparkConf then reads
    submitted = SparkConf()
    return {key: value for key, value in conf.items() if not submitted.contains(key)}
