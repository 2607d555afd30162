"""The command line's `deeprec-spark checkpoint ls|verify|diff|compact`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="checkpoint",
    help="List, verify, compare and compact checkpoints; paths and URIs (s3, hdfs, gs, abfs).",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Where = Annotated[
    str, typer.Argument(metavar="PATH", help="A model directory (its newest checkpoint) or a checkpoint.")
]


@contextmanager
def _errors() -> Iterator[None]:
    """Exit 1 where a checkpoint is broken, 2 where what was asked for cannot be."""
    from deeprec_spark.checkpoint.errors import CheckpointCorruptError

    try:
        yield
    except CheckpointCorruptError as error:
        typer.echo(f"{error}", err=True)
        raise typer.Exit(1) from error
    except (OSError, ValueError) as error:
        typer.echo(f"{error}", err=True)
        raise typer.Exit(2) from error


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, int], None]]:
    """Rows by table on standard error, while it is a terminal."""
    from rich.console import Console
    from rich.progress import Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), TextColumn("{task.completed:,.0f} rows"))
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def show(table: str, rows: int) -> None:
            if table not in tasks:
                tasks[table] = bars.add_task(table, total=None)
            bars.update(tasks[table], completed=rows)

        yield show


@app.command()
def ls(
    path: Annotated[str, typer.Argument(metavar="MODEL_DIR", help="A model directory, or one checkpoint.")],
) -> None:
    """List checkpoints in the order of their commits: name, kind, base, step, epoch, rows, bytes, when."""
    from deeprec_spark import checkpoint
    from deeprec_spark.checkpoint.directory import compacting, cut_short, scan
    from deeprec_spark.embedding.filesystem import parent, redacted

    with _errors():
        listing = scan(path)
        directories = [entry.directory for entry in listing.entries]
        left = cut_short(path) if directories else []
        if not directories and not listing.damaged:
            directories = [checkpoint.find(path)]
        typer.echo("name\tkind\tbase\tstep\tepoch\trows\tbytes\tcreated")
        running = compacting(path) if directories else []
        broken = False
        for directory in directories:
            name = parent(directory)[1]
            try:
                manifest = checkpoint.read_manifest(directory)
            except checkpoint.CheckpointCorruptError as error:
                typer.echo(f"{name}\tdamaged\t\t\t\t\t\t{error}")
                broken = True
                continue
            rows = sum(file.rows for file in manifest.files if "/part-" in file.path and file.table)
            size = sum(file.num_bytes for file in manifest.files)
            typer.echo(
                f"{name}\t{manifest.kind}\t{manifest.base or '-'}\t{manifest.step}\t{manifest.epoch}\t{rows}\t{size}\t"
                f"{manifest.created}"
            )
        for name, problem in listing.damaged.items():
            typer.echo(f"{name}\tdamaged\t\t\t\t\t\t{problem}")
            broken = True
        for name in left:
            typer.echo(f"{name}\tnot committed", err=True)
        for name in running:
            typer.echo(f"{name}\tbeing compacted, or broken off", err=True)
        if broken:
            typer.echo(f"A manifest is damaged. Received: {redacted(path)}", err=True)
            raise typer.Exit(1)


@app.command()
def verify(
    path: Where,
    fallback: Annotated[
        bool, typer.Option("--fallback", help="Also say which is the last good state, if this one is broken.")
    ] = False,
) -> None:
    """Read every file of a checkpoint and of all that it builds on; says what is damaged or missing.

    Of a model directory: every manifest, and the files of the newest checkpoint.
    """
    from deeprec_spark import checkpoint
    from deeprec_spark.checkpoint.chains import walk
    from deeprec_spark.checkpoint.directory import scan
    from deeprec_spark.embedding.filesystem import redacted

    with _errors():
        listing = scan(path)
        wrong = [str(error) for error in listing.damaged.values()]
        found = []
        if listing.entries or not listing.damaged:
            newest = listing.entries[-1].directory if listing.entries else checkpoint.find(path)
            try:
                found = walk(newest)
            except checkpoint.CheckpointCorruptError as error:
                wrong.append(str(error))
        for directory, manifest in reversed(found):
            problems = list(checkpoint.problems(directory, manifest.files))
            size = sum(file.num_bytes for file in manifest.files)
            state = f"{len(problems)} of {len(manifest.files)} files damaged" if problems else "ok"
            typer.echo(
                f"{redacted(directory)}\t{manifest.kind}\t{len(manifest.files)} files\t{size} bytes\t{state}"
            )
            wrong += problems
        for problem in wrong:
            typer.echo(problem, err=True)
        if not wrong:
            return
        if fallback:
            log = logging.getLogger("deeprec_spark.checkpoint")
            level = log.level
            log.setLevel(logging.ERROR)
            try:
                typer.echo(f"last good: {redacted(checkpoint.chain(path, fallback=True)[-1])}")
            finally:
                log.setLevel(level)
    raise typer.Exit(1)


@app.command()
def diff(
    before: Annotated[str, typer.Argument(metavar="BEFORE", help="A checkpoint or model directory.")],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="Another one.")],
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Compare two checkpoints: rows added, removed and changed by table, and norms of the values."""
    from deeprec_spark.checkpoint.tools import difference

    with _errors(), _progress(quiet) as progress:
        found = difference(before, after, progress=progress)
    typer.echo("table\tbefore\tafter\tadded\tremoved\tchanged\tnorm_before\tnorm_after\tnorm_of_change")
    for table in found:
        sides = [("-" if rows is None else str(rows)) for rows in (table.rows_before, table.rows_after)]
        typer.echo(
            f"{table.name}\t{sides[0]}\t{sides[1]}\t{table.added}\t{table.removed}\t{table.changed}\t"
            f"{table.norm_before:.6g}\t{table.norm_after:.6g}\t{table.change_norm:.6g}"
        )


@app.command()
def compact(
    path: Where,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", metavar="DIR", help="A new directory; without: a new checkpoint beside this one."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Make a full checkpoint of an incremental one and all that it builds on; these stay. Needs little memory."""
    from deeprec_spark.checkpoint import tools
    from deeprec_spark.embedding.filesystem import redacted

    with _errors(), _progress(quiet) as progress:
        made = tools.compact(path, target, progress=progress)
    typer.echo(redacted(made))
