"""The command line: `deeprec-spark prepare|train|evaluate|export|predict --conf job.yaml`, `checkpoint`, `demo` …

Exit codes: 0 done, 1 failed, 2 the configuration or the command is wrong.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from deeprec_spark.checkpoint.commands import app as checkpoint_app

app = typer.Typer(
    name="deeprec-spark",
    help="Train recommendation models with very large embedding tables on Spark.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(checkpoint_app)

Conf = Annotated[
    Path, typer.Option("--conf", metavar="FILE", help="The job's YAML; `deeprec-spark conf` shows some.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a value: --set training.epochs=2. Repeatable."),
]
ResultFile = Annotated[
    Path | None,
    typer.Option("--result", metavar="FILE", help="Also write the RESULT JSON to this file."),
]


def _job(module: str, name: str, conf: Path, overrides: list[str] | None, result: Path | None) -> None:
    import importlib

    from deeprec_spark.jobs import common

    job = getattr(importlib.import_module(f"deeprec_spark.jobs.{module}"), name)
    raise typer.Exit(common.run(job, str(conf), overrides or [], None if result is None else str(result)))


@app.command()
def prepare(conf: Conf, overrides: Overrides = None, result: ResultFile = None) -> None:
    """Raw data to Parquet and a feature spec."""
    _job("prepare_features", "prepare", conf, overrides, result)


@app.command()
def train(conf: Conf, overrides: Overrides = None, result: ResultFile = None) -> None:
    """Train on the prepared rows; goes on from the last checkpoint."""
    _job("train", "train", conf, overrides, result)


@app.command()
def evaluate(conf: Conf, overrides: Overrides = None, result: ResultFile = None) -> None:
    """Judge the last checkpoint on the held-out rows; fails below evaluation.min_auc."""
    _job("evaluate", "evaluate", conf, overrides, result)


@app.command()
def export(conf: Conf, overrides: Overrides = None, result: ResultFile = None) -> None:
    """Write the last checkpoint as a SavedModel."""
    _job("export", "export", conf, overrides, result)


@app.command()
def predict(conf: Conf, overrides: Overrides = None, result: ResultFile = None) -> None:
    """Score Parquet rows with the last checkpoint."""
    _job("predict", "predict", conf, overrides, result)


@app.command()
def query(
    model: Annotated[
        Path, typer.Option("--model", metavar="DIR", help="The SavedModel that `export` wrote.")
    ],
    row: Annotated[
        list[str] | None,
        typer.Option("--row", metavar="JSON", help="One row of raw values by column. Repeatable."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="A file of one JSON row per line."),
    ] = None,
) -> None:
    """Ask an exported model; needs TensorFlow only. Without rows: the columns that it takes."""
    from deeprec_spark import query as queries
    from deeprec_spark.quiet import import_tensorflow

    try:
        rows = [queries.parse_row(text, f"--row {number}") for number, text in enumerate(row or [], start=1)]
        if file is not None:
            lines = enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
            rows += [
                queries.parse_row(text, f"{file}, line {number}") for number, text in lines if text.strip()
            ]
        import_tensorflow()
        if row is None and file is None:
            for feature in queries.model_spec(str(model)).features:
                typer.echo(f"{feature.name}\t{feature.kind.value}\t{feature.raw_type}")
            return
        for answer in queries.query(str(model), rows):
            typer.echo(json.dumps(answer))
    except (OSError, ValueError) as error:
        typer.echo(f"{error}", err=True)
        raise typer.Exit(2) from error


@app.command()
def jars() -> None:
    """Print the BigDL jars, comma-separated: spark-submit --jars $(deeprec-spark jars)."""
    from deeprec_spark.session import find_jars

    typer.echo(",".join(str(jar) for jar in find_jars()))


@app.command()
def conf(name: Annotated[str | None, typer.Argument(help="Which one; without: the names.")] = None) -> None:
    """Print a job file to start from: deeprec-spark conf movielens > job.yaml."""
    from deeprec_spark.platform import resources

    if name is None:
        typer.echo("\n".join(resources.conf_names()))
        return
    if name not in resources.conf_names():
        typer.echo(f"Known are {', '.join(resources.conf_names())}. Received: {name!r}", err=True)
        raise typer.Exit(2)
    typer.echo(resources.read_conf(name), nl=False)


@app.command()
def doctor() -> None:
    """Check Python, Java, Spark, TensorFlow, BigDL and the engine; says what is missing and what to do."""
    from deeprec_spark.platform.doctor import examine

    findings = examine()
    for finding in findings:
        typer.echo(
            f"{'ok  ' if finding.ok else 'FAIL' if finding.needed else 'note'}  {finding.what}: {finding.found}"
        )
        if finding.remedy:
            typer.echo(f"      → {finding.remedy}")
    raise typer.Exit(1 if any(not finding.ok and finding.needed for finding in findings) else 0)


@app.command()
def demo(
    data: Annotated[
        str | None,
        typer.Option(
            "--data", metavar="PATH", help="Criteo TSV/CSV or MovieLens folder; default: generated rows."
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="DIR", help="Where data and model go: new, empty, or of an earlier demo."
        ),
    ] = Path("demo-out"),
    cluster: Annotated[
        bool, typer.Option("--cluster", help="On a real standalone cluster: 1 parameter server, 2 workers.")
    ] = False,
    mode: Annotated[
        str, typer.Option("--mode", metavar="async|sync", help="How workers train together.")
    ] = "async",
    rows: Annotated[int, typer.Option("--rows", help="Rows to generate.")] = 200_000,
) -> None:
    """The main job from end to end: features, training, evaluation, a deployable model."""
    from deeprec_spark.platform.demo import DemoOptions, run_demo

    try:
        options = DemoOptions(data=data, out=out, cluster=cluster, mode=mode, rows=rows)
    except ValueError as error:
        typer.echo(f"{error}", err=True)
        raise typer.Exit(2) from error
    raise typer.Exit(run_demo(options))


def main() -> None:
    """The console script."""
    app(prog_name=Path(sys.argv[0]).name)


if __name__ == "__main__":
    main()
