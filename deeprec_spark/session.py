"""The SparkSession: the one that is there, or a new one with Python, Java and BigDL's jars in order."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyspark
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from deeprec_spark import orca
from deeprec_spark.redaction import is_secret, redacted

logger = logging.getLogger(__name__)

BIGDL_PARTS = {
    "core": "bigdl-core==2.4.0.dev0",
    "dllib": "bigdl-dllib-spark3==2.4.0",
    "orca": "bigdl-orca-spark3==2.4.0",
    "friesian": "bigdl-friesian-spark3==2.4.0",
}
INSTALL_BIGDL = "pip install --no-deps " + " ".join(BIGDL_PARTS.values())
# Java versions that each Spark line starts on: the lowest, and the first that it fails on.
_JAVA = {3: (8, 24), 4: (17, 99)}

__all__ = ["SessionError", "SessionOptions", "current_session", "find_jars", "init_session"]


class SessionError(RuntimeError):
    """Something that a session needs is missing; the message says what, and how to mend it."""


@dataclass(frozen=True)
class SessionOptions:
    """What a session is made of.

    Args:
        conf: Spark settings, `spark.master` and `spark.app.name` among them. Where a session is there already,
            those that can change at run time are set, and the others are named in a warning.
        bigdl: put BigDL's jars on driver and executors and attach Orca's context. None does it where BigDL is
            installed and fits (Spark 3, and its classes reachable); True makes a misfit an error.

    Example:
        >>> SessionOptions(conf={"spark.master": "local[4]", "spark.driver.memory": "4g"}, bigdl=False)
        SessionOptions(conf={'spark.master': 'local[4]', 'spark.driver.memory': '4g'}, bigdl=False)
    """

    conf: Mapping[str, str] = field(default_factory=dict)
    bigdl: bool | None = None

    def __post_init__(self) -> None:
        wrong = [key for key in self.conf if not str(key).startswith("spark.")]
        if wrong:
            raise SessionError(
                f"Spark's settings begin with `spark.`: check the keys of conf. Received: {wrong}"
            )

    def __repr__(self) -> str:
        return f"SessionOptions(conf={redacted(self.conf)}, bigdl={self.bigdl})"


def init_session(conf: SessionOptions | Mapping[str, str] | None = None) -> SparkSession:
    """The session that is there (a notebook's, spark-submit's, Spark Connect's), or a new one.

    Executors run this interpreter: PYSPARK_PYTHON is set where nobody chose one. BigDL's jars reach driver and
    executors and Orca's context is attached, where BigDL is installed and Spark is 3.

    Args:
        conf: options, or just Spark's settings.

    Returns:
        The session, classic or Connect.

    Raises:
        SessionError: Java or the workers' Python is missing or does not fit, or `bigdl=True` and BigDL cannot
            be had.

    Example:
        >>> spark = init_session({"spark.master": "local[2]"})
        >>> spark.range(3).count()
        3
    """
    options = conf if isinstance(conf, SessionOptions) else SessionOptions(conf=dict(conf or {}))
    _drop_python_home()
    active = _active_session()
    spark = _adapt(active, options) if active is not None else _create(options)
    if _wants_bigdl(options, spark):
        _attach_bigdl(spark, required=options.bigdl is True)
    return spark


def current_session() -> SparkSession:
    """The session that is there; a SessionError where there is none.

    Example:
        >>> current_session() is init_session()
        True
    """
    active = _active_session()
    if active is None:
        raise SessionError(
            "There is no SparkSession: call init_session() first. Received: no active session in this process"
        )
    return active


def find_jars() -> list[Path]:
    """BigDL's jars, for `spark-submit --jars`; empty where BigDL is not installed.

    Raises:
        SessionError: only some of its parts are installed; the message has the command that installs the rest.
    """
    found = importlib.util.find_spec("bigdl")
    roots = [Path(root) for root in (found.submodule_search_locations or [])] if found else []
    by_part = {
        part: sorted(jar for root in roots for jar in root.glob(f"share/{part}/lib/*.jar"))
        for part in BIGDL_PARTS
    }
    if not any(by_part.values()):
        return []
    if missing := [part for part, jars in by_part.items() if not jars]:
        raise SessionError(
            f"BigDL lacks the jars of {missing}: run `pip install --no-deps "
            f"{' '.join(BIGDL_PARTS[part] for part in missing)}`. Received: {[str(root) for root in roots]}"
        )
    return [jar for jars in by_part.values() for jar in jars]


def is_connect(spark: SparkSession) -> bool:
    """Whether the session is a Spark Connect client, which has no SparkContext."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def _active_session() -> SparkSession | None:
    active = SparkSession.getActiveSession()
    # Active is a matter of threads: a context without an active session still has its session.
    if active is None and SparkContext._active_spark_context is not None:
        return SparkSession.builder.getOrCreate()
    return active


def _create(options: SessionOptions) -> SparkSession:
    builder: Any = SparkSession.builder
    remote = options.conf.get("spark.remote") or os.environ.get("SPARK_REMOTE")
    settings = dict(options.conf)
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ  # by spark-submit: the JVM runs already
    if not remote:
        _choose_python(settings)
        if not submitted:
            _check_java()
            settings.setdefault("spark.master", "local[*]")
            settings.setdefault("spark.app.name", "deeprec-spark")
            if str(settings["spark.master"]).startswith("local"):
                _check_python(os.environ["PYSPARK_PYTHON"])
            if options.bigdl is not False and _bigdl_misfit() is None:
                _add_jars(settings)
            _start_java(settings)
    for key, value in settings.items():
        builder = builder.config(key, str(value))
    spark: SparkSession = builder.getOrCreate()
    logger.info("Made a SparkSession: Spark %s, Python %s", spark.version, sys.executable)
    return spark


def _start_java(settings: Mapping[str, str]) -> None:
    """Start the JVM here if there are secrets: pyspark would put all settings on its command line, for all to read.

    The session's own settings reach the running JVM through its socket.
    """
    plain = [(key, str(value)) for key, value in settings.items() if not is_secret(key)]
    if len(plain) < len(settings):
        SparkContext._ensure_initialized(conf=SparkConf(loadDefaults=False).setAll(plain))


def _adapt(spark: SparkSession, options: SessionOptions) -> SparkSession:
    """Set what can be set on a session that is there."""
    ignored = []
    for key, value in options.conf.items():
        if spark.conf.get(key, None) == str(value):
            continue
        if spark.conf.isModifiable(key):
            spark.conf.set(key, str(value))
        else:
            ignored.append(key)
    if ignored:
        logger.warning(
            "The SparkSession is there already: %s cannot change any more; give them to spark-submit, or to the "
            "cluster that runs the notebook",
            ignored,
        )
    if not is_connect(spark):
        context = spark.sparkContext
        # "python3" is what pyspark takes where nobody chose: the first on PATH, seldom this virtual environment's.
        if context.pythonExec == "python3" and "PYSPARK_PYTHON" not in os.environ and _same_machine(context):
            context.pythonExec = sys.executable
            logger.info("Python workers run %s", sys.executable)
    return spark


def _same_machine(context: SparkContext) -> bool:
    return (context.master or "").startswith(("local", "spark://"))


def _choose_python(settings: dict[str, str]) -> None:
    chosen = settings.get("spark.pyspark.python")
    if chosen:
        os.environ["PYSPARK_PYTHON"] = chosen
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def _check_python(chosen: str) -> None:
    """Raise a SessionError unless the workers' Python, where it is another one, starts and is of our version."""
    if chosen == sys.executable:
        return
    ours = f"{sys.version_info[0]}.{sys.version_info[1]}"
    remedy = f"Set PYSPARK_PYTHON={sys.executable}, or unset it. Received: PYSPARK_PYTHON={chosen!r}"
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        shown = subprocess.run([chosen, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        raise SessionError(f"The Python of Spark's workers cannot be started ({error}). {remedy}") from error
    if shown.stdout.strip() != ours:
        raise SessionError(
            f"Spark's workers must run the driver's Python version. {remedy}, version "
            f"{shown.stdout.strip() or shown.stderr[:200]!r} beside {ours}"
        )


def _drop_python_home() -> None:
    """A PYTHONHOME that points into a virtual environment (BigDL exports such) kills every Python worker."""
    home = os.environ.get("PYTHONHOME")
    if home and sys.prefix != sys.base_prefix and Path(home).resolve() == Path(sys.prefix).resolve():
        logger.warning(
            "Unset PYTHONHOME=%s: in a virtual environment no Python worker can start with it", home
        )
        del os.environ["PYTHONHOME"]


def _check_java() -> None:
    """Raise a SessionError unless a Java is found that this Spark starts on."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    lowest, too_new = _JAVA.get(_spark_major(), _JAVA[4])
    remedy = f"Spark {pyspark.__version__} needs Java {lowest} to {too_new - 1} (17 fits): install it, or set JAVA_HOME"
    if java is None or not Path(java).is_file():
        raise SessionError(
            f"No Java was found. {remedy}. Received: JAVA_HOME={home!r}, `java` on PATH: {shutil.which('java')}"
        )
    shown = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False)
    version = _java_version(shown.stderr + shown.stdout)
    if version is None:
        raise SessionError(
            f"{java} does not tell its version. {remedy}. "
            f"Received: exit code {shown.returncode}, {shown.stderr[:200]!r}"
        )
    if not lowest <= version < too_new:
        raise SessionError(f"Java does not fit. {remedy}. Received: Java {version} at {java}")


def _java_version(text: str) -> int | None:
    """The feature version in the output of `java -version`: 8 for "1.8.0_372", 17 for "17.0.15"."""
    found = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(found.group(1)) if found else None


def _spark_major() -> int:
    return int(pyspark.__version__.split(".")[0])


def _bigdl_misfit() -> str | None:
    """Why BigDL cannot run here, None where it can."""
    if not find_jars():
        return f"BigDL is not installed: run `{INSTALL_BIGDL}`"
    if _spark_major() != 3:
        return (
            f"BigDL's jars are Scala 2.12 and load on Spark 3 only. Received: pyspark {pyspark.__version__}"
        )
    if sys.version_info >= (3, 12) and importlib.util.find_spec("distutils") is None:
        return f"BigDL imports distutils: install setuptools, or use Python 3.11. Received: {sys.version.split()[0]}"
    return None


def _wants_bigdl(options: SessionOptions, spark: SparkSession) -> bool:
    if options.bigdl is False:
        return False
    misfit = "Spark Connect has no SparkContext, which Orca needs" if is_connect(spark) else _bigdl_misfit()
    if misfit is None:
        return True
    if options.bigdl:
        raise SessionError(f"bigdl=True, but BigDL cannot be used. {misfit}")
    logger.info("Orca's context is not attached. %s", misfit)
    return False


def _add_jars(settings: dict[str, str]) -> None:
    """The jars for driver and executors, behind the user's own.

    Not spark.driver.extraClassPath: there, the logging configuration inside BigDL's jars would take Spark's place.
    """
    own = settings.get("spark.jars")
    settings["spark.jars"] = ",".join([*([own] if own else []), *(str(jar) for jar in find_jars())])


def _attach_bigdl(spark: SparkSession, *, required: bool) -> None:
    missing = orca.missing_classes(spark)
    if missing:
        message = (
            "BigDL's jars are not on the driver's class path, and a running driver cannot take them: start it with "
            f"`spark-submit --jars $(deeprec-spark jars) …`. Received: no class {missing[0]}"
        )
        if required:
            raise SessionError(message)
        logger.warning("Orca's context is not attached. %s", message)
        return
    try:
        orca.attach(spark)
    except orca.OrcaError as error:
        if required:
            raise SessionError(str(error)) from error
        logger.warning("Orca's context is not attached. %s", error)
