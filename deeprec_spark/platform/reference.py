"""docs/configuration.md from the configuration's models: `python -m deeprec_spark.platform.reference FILE`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deeprec_spark.config import JobConfig
from deeprec_spark.platform import resources

INTRODUCTION = """\
# Configuration of a job

A YAML file with the sections below. Unknown keys are errors; every wrong key is named by its path. On the command line
`--set section.key=value` overrides the file. Needed keys have no default.

This page is made from the models in deeprec_spark/config.py by `python -m deeprec_spark.platform.reference`.
"""


def render() -> str:
    """The page as Markdown."""
    parts = [INTRODUCTION, _table("(top level)", JobConfig, "Beside the sections.")]
    for name, field in JobConfig.model_fields.items():
        section = _section(field)
        if section is not None:
            parts += _sections(name, section)
    parts.append(
        f"## Example\n`deeprec-spark conf movielens` prints:\n\n```yaml\n{resources.read_conf('movielens')}```\n"
    )
    return "\n".join(parts)


def _sections(path: str, section: type[BaseModel]) -> list[str]:
    """The table of a section and those of the sections in it."""
    parts = [_table(path, section, (section.__doc__ or "").strip())]
    for name, field in section.model_fields.items():
        inner = _section(field)
        if inner is not None:
            parts += _sections(f"{path}.{name}", inner)
    return parts


def _table(path: str, section: type[BaseModel], text: str) -> str:
    paragraphs = "\n".join(line.strip() for line in text.splitlines())
    rows = [
        f"| {name} | {_type(field)} | {_default(field)} | {field.description or ''} |"
        for name, field in section.model_fields.items()
        if path != "(top level)" or _section(field) is None
    ]
    return (
        f"## {path}\n{paragraphs}\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
        + "\n".join(rows)
        + "\n"
    )


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field holds, if it holds one."""
    for part in (field.annotation, *get_args(field.annotation)):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def _type(field: FieldInfo) -> str:
    if _section(field) is not None:
        return "section"
    annotation: Any = field.annotation
    text = (
        annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)
    )
    for written in ("typing.", "Literal", "Annotated"):
        text = text.replace(written, "")
    if text.startswith("["):
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    return f"`{text}`".replace("|", "\\|")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**needed**"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    return "" if value is None else f"`{json.dumps(value)}`"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page to the file that is named."""
    (target,) = sys.argv[1:] if argv is None else argv
    Path(target).write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
