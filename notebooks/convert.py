"""From Databricks' source format to .ipynb: `python notebooks/convert.py`; a test keeps the two equal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HEADER = "# Databricks notebook source"
SEPARATOR = "# COMMAND ----------"
MAGIC = "# MAGIC"
NOTEBOOKS = Path(__file__).resolve().parent


def convert(source: str) -> dict[str, Any]:
    """The notebook (nbformat 4.5) of a Databricks source file.

    Raises:
        ValueError: The text is no such file, or uses a magic other than `%md`.
    """
    first, _, rest = source.partition("\n")
    if first.strip() != HEADER:
        raise ValueError(f"A Databricks notebook begins with {HEADER!r}. Received: {first!r}")
    cells = [
        _cell(f"cell-{number}", text.strip("\n"))
        for number, text in enumerate(rest.split(SEPARATOR), start=1)
    ]
    return {
        "cells": cells,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def dumps(notebook: dict[str, Any]) -> str:
    """The notebook as text, always the same for the same notebook."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _cell(name: str, text: str) -> dict[str, Any]:
    lines = text.splitlines()
    if lines and lines[0].startswith(MAGIC):
        content = [line.removeprefix(MAGIC).removeprefix(" ") for line in lines]
        if content[0].strip() != "%md":
            raise ValueError(f"Only the magic %md is known. Received: {content[0]!r}")
        return {"cell_type": "markdown", "id": name, "metadata": {}, "source": _source(content[1:])}
    return {
        "cell_type": "code",
        "execution_count": None,
        "id": name,
        "metadata": {},
        "outputs": [],
        "source": _source(lines),
    }


def _source(lines: list[str]) -> list[str]:
    return [line + "\n" for line in lines[:-1]] + lines[-1:]


def main() -> int:
    """Write the .ipynb of each notebook beside it."""
    for source in sorted(NOTEBOOKS.glob("*.py")):
        text = source.read_text(encoding="utf-8")
        if text.startswith(HEADER):
            source.with_suffix(".ipynb").write_text(dumps(convert(text)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
