"""What `deeprec-spark doctor` looks at: is everything here that a job needs, and do the versions fit."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

# Java releases that each Spark runs on, as its documentation lists them.
JAVA_RELEASES = {3: (8, 11, 17), 4: (17, 21)}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `needed` findings that are not `ok` stop a job."""

    what: str
    found: str
    ok: bool
    remedy: str = ""
    needed: bool = True


def examine() -> list[Finding]:
    """Look at Python, Spark, Java, TensorFlow, the engine and BigDL; starts no session."""
    return [python(), pyspark(), spark_home(), java(), tensorflow(), engine(), bigdl()]


def python() -> Finding:
    """The interpreter, and whether executors are told to use another one."""
    other = os.environ.get("PYSPARK_PYTHON")
    found = f"{sys.version.split()[0]} at {sys.executable}"
    if other and shutil.which(other) and not Path(str(shutil.which(other))).samefile(sys.executable):
        return Finding(
            "Python",
            f"{found}, but PYSPARK_PYTHON is {other}",
            ok=False,
            remedy="Executors would run that one: unset PYSPARK_PYTHON, unless it has deeprec-spark too.",
            needed=False,
        )
    ok = sys.version_info >= (3, 10)
    return Finding("Python", found, ok, "" if ok else "Use Python 3.10 or newer; 3.11 is tested.")


def pyspark() -> Finding:
    """The version of pyspark."""
    version = _version("pyspark")
    ok = version is not None and version.split(".")[0] in ("3", "4") and _pair(version) >= (3, 5)
    return Finding("pyspark", version or "not installed", ok, "" if ok else "pip install 'pyspark>=3.5,<5'")


def spark_home() -> Finding:
    """SPARK_HOME, when it is set, must be the Spark of the installed pyspark."""
    home = os.environ.get("SPARK_HOME")
    if not home:
        return Finding("SPARK_HOME", "not set: pyspark's own Spark is used", ok=True)
    jars = sorted(Path(home).glob("jars/spark-core_*.jar"))
    match = re.search(r"spark-core_[\d.]+-([\d.]+)", jars[0].name) if jars else None
    found, wanted = match.group(1) if match else "no Spark", _version("pyspark") or "none"
    ok = _pair(found) == _pair(wanted)
    remedy = (
        ""
        if ok
        else f"Unset SPARK_HOME, or install pyspark=={found}: driver and Spark must be of one version."
    )
    return Finding("SPARK_HOME", f"{home} ({found})", ok, remedy)


def java() -> Finding:
    """The Java that Spark would start."""
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    spark = int((_version("pyspark") or "3").split(".")[0])
    wanted = JAVA_RELEASES.get(spark, (17,))
    remedy = f"Install Java {wanted[-1]} and set JAVA_HOME, or put `java` on PATH."
    if program is None or not Path(program).exists():
        return Finding("Java", f"not found{f' in JAVA_HOME={home}' if home else ''}", ok=False, remedy=remedy)
    done = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=30, check=False)
    match = re.search(r'version "(?:1\.)?(\d+)[^"]*"', done.stderr)
    if match is None:
        return Finding(
            "Java", f"{program} does not tell its version: {done.stderr[:200]}", ok=False, remedy=remedy
        )
    release = int(match.group(1))
    ok = release in wanted
    releases = ", ".join(map(str, wanted))
    return Finding(
        "Java",
        f"{release} at {program}",
        ok,
        "" if ok else f"Spark {spark} runs on Java {releases}. {remedy}",
    )


def tensorflow() -> Finding:
    """TensorFlow and Keras, by their metadata: importing them takes seconds."""
    version, keras = _version("tensorflow") or _version("tensorflow-cpu"), _version("keras")
    ok = version is not None and _pair(version) >= (2, 19) and keras is not None and keras.startswith("3.")
    found = f"TensorFlow {version}, Keras {keras}"
    return Finding("TensorFlow", found, ok, "" if ok else "pip install 'tensorflow>=2.19'")


def engine() -> Finding:
    """The compiled extension must load on this processor and this C library."""
    try:
        importlib.import_module("deeprec_spark.embedding._core")
    except ImportError as error:
        remedy = "Reinstall deeprec-spark; from source it needs g++ and the headers of Python."
        return Finding("engine", f"does not load: {error}", ok=False, remedy=remedy)
    return Finding("engine", "loads", ok=True)


def bigdl() -> Finding:
    """BigDL is optional: only Friesian's JVM operators and Orca's XShards need it."""
    version = _version("bigdl-friesian-spark3")
    spark = int((_version("pyspark") or "3").split(".")[0])
    if spark >= 4:
        return Finding("BigDL", f"{version or 'not installed'}; not used on Spark 4", ok=True, needed=False)
    if version is None or importlib.util.find_spec("bigdl") is None:
        remedy = "Only for Friesian's and Orca's own functions: see 'BigDL' in the README for the command."
        return Finding("BigDL", "not installed", ok=False, remedy=remedy, needed=False)
    return Finding("BigDL", version, ok=True, needed=False)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _pair(version: str) -> tuple[int, ...]:
    """Major and minor of a version, () of a text that is none."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, match.groups())) if match else ()
