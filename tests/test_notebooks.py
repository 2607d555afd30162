"""The quick start as a notebook: equal to its source, and it runs. (As a script it runs in tests/test_wheel.py.)"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from notebooks import convert
from tests.conftest import ROOT

SOURCE = ROOT / "notebooks" / "quickstart.py"
ENV = {"QUICKSTART_ROWS": "4000", "SPARK_LOCAL_IP": "127.0.0.1"}


def test_the_notebook_is_that_of_the_source() -> None:
    expected = convert.dumps(convert.convert(SOURCE.read_text(encoding="utf-8")))
    found = SOURCE.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert found == expected, "run: python notebooks/convert.py"


def test_it_is_valid_and_without_outputs() -> None:
    notebook = nbformat.read(SOURCE.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(notebook)
    kinds = [cell.cell_type for cell in notebook.cells]
    assert {"markdown", "code"} == set(kinds)
    assert not any(cell.get("outputs") for cell in notebook.cells)


@pytest.mark.parametrize("text", ["print(1)\n", "# Databricks notebook source\n# MAGIC %sh\n# MAGIC ls\n"])
def test_what_cannot_be_converted_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="Received:"):
        convert.convert(text)


def test_it_runs_as_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {**ENV, "QUICKSTART_DIR": str(tmp_path / "work"), "IPYTHONDIR": str(tmp_path)}.items():
        monkeypatch.setenv(key, value)
    notebook = nbformat.read(SOURCE.with_suffix(".ipynb"), as_version=4)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    texts = [_text(output) for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("'auc'" in text for text in texts)
    assert (tmp_path / "work" / "model" / "saved_model.pb").is_file()
    assert os.listdir(tmp_path / "work" / "model_dir")


def _text(output: Any) -> str:
    return str(output.get("text") or output.get("data", {}).get("text/plain", ""))
