"""WarmStart: what of another checkpoint a new model begins with."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class WarmStart:
    """How a model begins with the weights of a checkpoint that is not simply its own last one.

    Steps begin at 0, and rows count as never updated; optimizer state and frequencies go on, unless `values_only`.

    Args:
        path: the checkpoint, or a model directory, whose newest one is taken; a path or URI.
        values_only: take the rows' values alone: optimizer state, frequencies and versions start anew, so the
            optimizer, the value type and the options may differ. The same for the dense weights.
        tables: the model's tables to fill, the others start empty; None is all of them, and a table that only one side
            has is an error.
        rename: the checkpoint's name of a table to the model's.
        new_tables: let tables of the model that the checkpoint lacks start empty.
        dense: take the dense weights too; they must fit.
        dense_only: take the dense weights and no table.

    Example:
        >>> WarmStart("s3://models/ctr", rename={"item": "product"}, new_tables=True).source_of("product")
        'item'
    """

    path: str
    values_only: bool = False
    tables: tuple[str, ...] | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    new_tables: bool = False
    dense: bool = True
    dense_only: bool = False

    def __post_init__(self) -> None:
        if self.tables is not None:
            object.__setattr__(self, "tables", tuple(self.tables))
        if self.dense_only and (not self.dense or self.tables or self.rename):
            raise ValueError(
                "dense_only takes the dense weights and no table: leave tables, rename and dense alone. "
                f"Received: tables={self.tables}, rename={dict(self.rename)}, dense={self.dense}"
            )
        if len(set(self.rename.values())) < len(self.rename):
            raise ValueError(
                f"Two tables of the checkpoint cannot become one. Received: rename={dict(self.rename)}"
            )

    def source_of(self, table: str) -> str:
        """The checkpoint's name of one of the model's tables."""
        for theirs, ours in self.rename.items():
            if ours == table:
                return theirs
        return table

    def sources(self, saved: Collection[str], wanted: Collection[str]) -> dict[str, str]:
        """The checkpoint's table for each of the model's tables that is to be filled.

        Raises:
            ValueError: names the tables that only one side has, both sides listed.
        """
        if self.dense_only:
            return {}
        asked = sorted(wanted) if self.tables is None else list(self.tables)
        wrong = [name for name in (*asked, *self.rename.values()) if name not in wanted]
        wrong += [name for name in self.rename if name not in saved]
        sources = {name: self.source_of(name) for name in asked}
        # The table of an equal name may have gone to another one of the model.
        sources = {
            ours: theirs
            for ours, theirs in sources.items()
            if theirs in saved and (theirs != ours or ours not in self.rename)
        }
        if not self.new_tables or self.tables is not None:
            wrong += [name for name in asked if name not in sources]
        if self.tables is None:
            wrong += sorted(set(saved) - set(sources.values()))
        if wrong:
            raise ValueError(
                f"The checkpoint to start from has other tables than the model, {sorted(set(wrong))} do not fit: give "
                f"rename, tables or new_tables. Received: {sorted(saved)} in the checkpoint, {sorted(wanted)} in the "
                f"model, rename={dict(self.rename)}, tables={self.tables}"
            )
        return sources

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "rename": dict(self.rename)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> WarmStart:
        """From what `to_dict` gave."""
        tables = data.get("tables")
        return cls(**{**data, "tables": None if tables is None else tuple(tables)})
