"""`make demo` and `make demo-cluster`: the main job from raw rows to a deployable model, and a short table."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from rich.console import Console
from rich.table import Table

from deeprec_spark.config import JobConfig, parse_config
from deeprec_spark.platform import resources

logger = logging.getLogger(__name__)

Mode = Literal["async", "sync"]
NUM_PS, WORKERS = 1, 2
STEPS = {
    "prepare": "Prepare features",
    "train": "Train",
    "evaluate": "Evaluate on held-out rows",
    "export": "Export the model",
}
SCRIPTS = {"prepare": "prepare_features", "train": "train", "evaluate": "evaluate", "export": "export"}
SUBMIT_TIMEOUT = 3600.0
MARKER = ".deeprec-demo"

Result = dict[str, Any]
Runner = Callable[[str], Result]


@dataclass(frozen=True)
class DemoOptions:
    """What the demo is told.

    Args:
        data: Criteo file or folder, or MovieLens folder; None generates `rows` Criteo-like rows.
        out: Where everything goes: new, empty or of an earlier demo, whose files are removed.
        cluster: Start a standalone cluster and submit the jobs to it, instead of training in this process.
        mode: How the cluster's workers train together.
        rows: Rows to generate.
    """

    data: str | None = None
    out: Path = Path("demo-out")
    cluster: bool = False
    mode: str = "async"
    rows: int = 200_000

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode is one of {', '.join(get_args(Mode))}. Received: mode={self.mode!r}")
        if self.data is not None and "://" not in self.data and not Path(self.data).exists():
            raise ValueError(f"There is no such file or folder. Received: data={self.data!r}")


def detect_kind(data: str | None) -> Literal["synthetic", "criteo", "movielens"]:
    """What a path holds: a MovieLens folder is known by its file names, all else is taken for Criteo."""
    if data is None:
        return "synthetic"
    if any((Path(data) / name).is_file() for name in ("u.data", "ratings.dat")):
        return "movielens"
    return "criteo"


def demo_config(options: DemoOptions) -> JobConfig:
    """The packaged configuration of this kind of data, with the demo's paths and nodes."""
    kind = detect_kind(options.data)
    values = yaml.safe_load(resources.read_conf(kind))
    out = options.out.absolute()
    values["data"]["prepared"] = str(out / "prepared")
    values["training"]["model_dir"] = str(out / "model_dir")
    values["export"]["path"] = str(out / "model")
    if kind == "synthetic":
        values["data"]["rows"] = options.rows
    else:
        assert options.data is not None
        values["data"]["path"] = options.data if "://" in options.data else str(Path(options.data).absolute())
    nodes = (
        {"num_ps": NUM_PS, "workers": WORKERS, "mode": options.mode}
        if options.cluster
        else {"num_ps": 0, "workers": 1}
    )
    values["cluster"] = {**nodes, "conf": {} if options.cluster else local_conf()}
    return parse_config(values, source=f"conf/{kind}.yaml")


def local_conf() -> dict[str, str]:
    """Spark properties of the embedded demo: all cores, nothing on the terminal but warnings."""
    return {
        "spark.master": "local[*]",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={resources.log4j2_path().as_uri()}",
    }


def run_demo(options: DemoOptions) -> int:
    """Run it; returns the exit code. The last line of standard output is `RESULT {json}`."""
    from deeprec_spark.jobs import common

    started = time.monotonic()
    common.setup_logging()
    try:
        check_out(options.out)
        config = demo_config(options)
    except ValueError as error:
        logger.error("%s", error)
        return common.EXIT_CONFIG
    # A demo that is told to end cleans up, as one that is interrupted does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    clear_out(options.out)
    console = Console(stderr=True)
    results: dict[str, Result] = {}
    try:
        with _on_cluster(options, config) if options.cluster else _embedded(config) as runner:
            for number, (step, title) in enumerate(STEPS.items(), start=1):
                console.print(f"[bold]{number}/{len(STEPS)} {title} …[/bold]")
                begun = time.monotonic()
                results[step] = runner(step)
                console.print(f"    done in {time.monotonic() - begun:.0f} s", highlight=False)
    except KeyboardInterrupt:
        logger.warning("Interrupted")
        return common.EXIT_INTERRUPTED
    except Exception:
        logger.exception("The demo failed")
        return common.EXIT_FAILURE
    summary = summarize(options, config, results)
    example = options.out / "example.jsonl"
    example.write_text(json.dumps(example_row(config)) + "\n", encoding="utf-8")
    show(summary, example, time.monotonic() - started)
    common.report(summary)
    return common.EXIT_OK


def check_out(out: Path) -> None:
    """A ValueError where `out` holds what no demo wrote: it would be removed."""
    if not out.exists() or (out / MARKER).is_file():
        return
    if not out.is_dir() or any(out.iterdir()):
        raise ValueError(
            "The demo empties its folder first, and this is not empty and not of a demo: name another, "
            f"or remove it yourself. Received: out={str(out)!r}"
        )


def clear_out(out: Path) -> None:
    """Make the folder, mark it as a demo's, and remove what an earlier demo left."""
    out.mkdir(parents=True, exist_ok=True)
    (out / MARKER).write_text(
        "Written by deeprec-spark demo, which may empty this folder.\n", encoding="utf-8"
    )
    for folder in ("prepared", "model_dir", "model", "cluster"):
        shutil.rmtree(out / folder, ignore_errors=True)


def summarize(options: DemoOptions, config: JobConfig, results: dict[str, Result]) -> Result:
    """The numbers that a reader wants, of all four jobs."""
    summary: Result = {
        "rows": results["prepare"]["rows"],
        "steps": results["train"]["steps"],
        "samples_per_s": results["train"]["samples_per_s"],
        "auc": results["evaluate"]["auc"],
    }
    if "best_auc" in results["evaluate"]:
        summary["best_auc"] = results["evaluate"]["best_auc"]
    summary["model"] = results["export"]["model"]
    summary["mode"] = config.cluster.mode if options.cluster else "embedded"
    return summary


def show(summary: Result, example: Path, seconds: float) -> None:
    """The table on standard output, and how to ask the model."""
    console = Console()
    table = Table(show_header=False)
    table.add_row("rows", f"{summary['rows']:,}")
    table.add_row("steps", f"{summary['steps']:,}")
    table.add_row("samples/s", f"{summary['samples_per_s']:,}")
    defined = math.isfinite(summary["auc"] if summary["auc"] is not None else math.nan)
    table.add_row("AUC", f"{summary['auc']:.4f}" if defined else "undefined: held-out rows of one class")
    if "best_auc" in summary:
        table.add_row("best possible AUC", f"{summary['best_auc']:.4f}")
    table.add_row("mode", summary["mode"])
    table.add_row("time", f"{seconds:.0f} s")
    console.print(table)
    command = Path(sys.argv[0])
    shown = command if command.name == "deeprec-spark" else Path("deeprec-spark")
    # Not by rich: these lines are copied into a shell, so they must not be wrapped.
    sys.stdout.write(f"The model is in {_relative(Path(summary['model']))}. Ask it:\n")
    sys.stdout.write(
        f"  {_relative(shown)} query --model {_relative(Path(summary['model']))} --file {_relative(example)}\n"
    )


def example_row(config: JobConfig) -> dict[str, Any]:
    """One row of raw values, as a caller of the deployed model would send it."""
    if config.data.kind == "movielens":
        row: dict[str, Any] = {
            "user": 196,
            "item": 242,
            "gender": "M",
            "occupation": "writer",
            "age": 45,
            "zip": "551",
        }
        return {**row, "genres": ["Comedy"]}
    counts = {f"I{i}": float(i) for i in range(1, 14)}
    return {**counts, **{f"C{i}": "05db9164" for i in range(1, 27)}}


def _relative(path: Path) -> str:
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(path)


@contextmanager
def _embedded(config: JobConfig) -> Iterator[Runner]:
    """All four jobs in this process, on one local session."""
    import importlib

    from deeprec_spark.jobs import common

    with common.job_session(config) as spark:

        def run(step: str) -> Result:
            job: common.Job = getattr(importlib.import_module(f"deeprec_spark.jobs.{SCRIPTS[step]}"), step)
            return job(spark, config)

        yield run


@contextmanager
def _on_cluster(options: DemoOptions, config: JobConfig) -> Iterator[Runner]:
    """Each job by spark-submit, on a standalone cluster that lives as long as the context."""
    from deeprec_spark import jobs
    from deeprec_spark.platform.standalone import StandaloneCluster, spark_home

    work = options.out.absolute() / "cluster"
    work.mkdir(parents=True, exist_ok=True)
    job_file = work / "job.yaml"
    job_file.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
    scripts = Path(str(jobs.__file__)).parent
    with StandaloneCluster(workers=1, executors=NUM_PS + WORKERS, directory=work / "spark") as cluster:
        logger.info(
            "Spark standalone cluster %s: %d executors; logs in %s",
            cluster.master_url,
            cluster.executors,
            work,
        )

        def run(step: str) -> Result:
            result = work / f"{step}.json"
            command = [
                str(spark_home() / "bin" / "spark-submit"),
                *cluster.submit_arguments(),
                *("--driver-java-options", f"-Dlog4j2.configurationFile={resources.log4j2_path().as_uri()}"),
                str(scripts / f"{SCRIPTS[step]}.py"),
                *("--conf", str(job_file), "--result", str(result)),
            ]
            env = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
            # Its RESULT line is not the demo's: what a job prints goes to standard error.
            done = subprocess.run(command, env=env, stdout=sys.stderr, timeout=SUBMIT_TIMEOUT, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"{step}: spark-submit ended with {done.returncode}; its output is above")
            values: Result = json.loads(result.read_text(encoding="utf-8"))
            return values

        yield run
