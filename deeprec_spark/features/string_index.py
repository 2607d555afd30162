"""StringIndex: the ids of a column's values, from 1; 0 is left for unknown ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame
from pyspark.sql.types import DataType
from typing_extensions import Self

from deeprec_spark.features.arrow import DataError
from deeprec_spark.features.base_table import Names
from deeprec_spark.features.friesian import friesian_class
from deeprec_spark.features.numbers import NumberOperators
from deeprec_spark.session import current_session

if TYPE_CHECKING:

    class _Friesian:
        """Friesian's class of this name, where BigDL is installed."""
else:
    _Friesian = friesian_class("StringIndex")

__all__ = ["StringIndex"]


class StringIndex(NumberOperators, _Friesian):
    """A table with the columns `col_name` and `id` (and perhaps others).

    Example:
        >>> StringIndex.from_dict({"de": 1, "fr": 2}, "country").to_dict()
        {'de': 1, 'fr': 2}
    """

    def __init__(self, df: DataFrame, col_name: str) -> None:
        missing = [name for name in (col_name, "id") if name not in df.columns]
        if missing:
            raise DataError(f"A StringIndex needs the columns {missing}. Received: columns {df.columns}")
        super().__init__(df)
        self.col_name = col_name

    def _clone(self, df: DataFrame) -> Self:
        return type(self)(df, self.col_name)

    @classmethod
    def read_parquet(cls, paths: str | Sequence[str], col_name: str | None = None) -> Self:
        """Read what `write_parquet` wrote; the column's name is the file's unless given."""
        files = [paths] if isinstance(paths, str) else list(paths)
        name = col_name or files[0].rstrip("/").rsplit("/", 1)[-1].split(".")[0]
        return cls(current_session().read.parquet(*files), name)

    @classmethod
    def from_dict(cls, indices: Mapping[str, int], col_name: str) -> Self:
        """An index of {value: id}."""
        if not isinstance(indices, Mapping) or not isinstance(col_name, str) or not col_name:
            raise DataError(
                f"from_dict needs a dict and a name. Received: {type(indices).__name__}, {col_name!r}"
            )
        schema = f"`{col_name}` string not null, id int not null"
        return cls(current_session().createDataFrame(list(indices.items()), schema), col_name)

    def to_dict(self) -> dict[Any, int]:  # type: ignore[override]  # Friesian's meaning: value to id
        """{value: id}, on the driver."""
        return {row[self.col_name]: row["id"] for row in self.df.collect()}

    def write_parquet(self, path: str, mode: str = "overwrite") -> None:
        """Write `<path>/<col_name>.parquet`."""
        super().write_parquet(f"{path}/{self.col_name}.parquet", mode)

    def cast(self, columns: Names | None, dtype: str | DataType) -> Self:
        """Cast columns; the result is an index still."""
        return super().cast(columns, dtype)
