"""Criteo's display-advertising data to prepared features: 13 counts, 26 hashed categories, one label."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import and_

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's documentation uses
from pyspark.sql.types import NumericType, StringType, StructField, StructType

from deeprec_spark.features.output import MALFORMED, check_fraction, check_malformed, write_splits
from deeprec_spark.features.prepare import DataError, PrepareReport, prepare_dataframe, quoted
from deeprec_spark.features.spec import Feature, FeatureKind, FeatureSpec, Label

LABEL = "label"
INTEGER_COLUMNS = tuple(f"I{i}" for i in range(1, 14))
CATEGORY_COLUMNS = tuple(f"C{i}" for i in range(1, 27))
COLUMNS = (LABEL, *INTEGER_COLUMNS, *CATEGORY_COLUMNS)
_CORRUPT = "__corrupt__"
_FIRST_LINES = 20  # enough to tell the delimiter and the header from, whatever a line of them holds

__all__ = [
    "CATEGORY_COLUMNS",
    "COLUMNS",
    "INTEGER_COLUMNS",
    "LABEL",
    "criteo_spec",
    "prepare_criteo",
    "read_criteo",
]


def criteo_spec() -> FeatureSpec:
    """The features of Criteo data.

    The 13 counts are dense, `ln(1 + max(x, 0))`, null as 0; the few negative counts of the real data (-1, -2:
    an unknown count) become 0 with that. The 26 categories are hashed, null as the hash of "".
    """
    return FeatureSpec(
        features=(
            *(
                Feature(name=name, kind=FeatureKind.DENSE, raw_type="float32", default=0.0, transform="log1p")
                for name in INTEGER_COLUMNS
            ),
            *(
                Feature(name=name, kind=FeatureKind.CATEGORICAL, raw_type="string", default="")
                for name in CATEGORY_COLUMNS
            ),
        ),
        labels=(Label(name=LABEL),),
    )


def prepare_criteo(
    spark: SparkSession,
    data: str | DataFrame,
    out: str,
    *,
    test_fraction: float = 0.2,
    max_malformed: float = 0.01,
    keep: Sequence[str] = (),
    group_by: Sequence[str] | None = None,
    group_features: Sequence[str] | None = None,
) -> FeatureSpec:
    """Prepare Criteo data: `<out>/train` and `<out>/test` as Parquet, `feature_spec.json`, `report.json`.

    A row belongs to the test set by a hash of its content, so the split does not depend on the order of rows.

    Args:
        spark: the session.
        data: a DataFrame with Criteo's columns, or a path: TSV or CSV with or without header, or Parquet.
        out: a folder, local or of any file system that Spark knows; overwritten.
        test_fraction: share of the rows in the test set.
        max_malformed: a row is malformed if it has not 40 fields, a count that is no number or a label that
            is neither 0 nor 1. Malformed rows are left out and counted; more than this share is an error.
            Blank lines, those of nothing but tabs among them, are no rows.
        keep: further columns to carry along, such as the planted `probability` of generated data.
        group_by: store the samples in groups by these columns; None: flat.
        group_features: features stored once for a group, which Criteo's names do not tell.

    Returns:
        The spec that was written.

    Raises:
        MalformedDataError: too many malformed rows; the message quotes some.
        DataError: a column is missing.
        EmptyDataError: no rows.

    Example:
        >>> spec = prepare_criteo(spark, "criteo/train.txt", "prepared")
        >>> spark.read.parquet("prepared/train").columns[:3]
        ['I1', 'I2', 'I3']
    """
    check_fraction(test_fraction)
    raw = read_criteo(spark, data) if isinstance(data, str) else data
    parsed = _parse(raw, keep)
    report = PrepareReport(malformed=check_malformed(parsed, max_malformed, "Criteo rows"))
    spec = criteo_spec()
    if group_by:
        spec = spec.grouped(group_by, group_features)
    split = F.pmod(F.xxhash64(*[quoted(name) for name in COLUMNS]), F.lit(1_000_000)) < round(
        test_fraction * 1_000_000
    )
    rows = parsed.withColumn("__test__", split).withColumn("__drop__", F.col(MALFORMED).isNotNull())
    prepared = prepare_dataframe(
        rows, spec, keep=[*keep, "__test__"], drop="__drop__", group=False, report=report
    )
    write_splits(prepared, "__test__", out, spec, report)
    return spec


def read_criteo(spark: SparkSession, path: str) -> DataFrame:
    """Read Criteo's columns as text (Parquet: as they are); delimiter and header are found out.

    The delimiter is the one, tab or comma, that gives the 40 fields most often among the first lines that are not
    blank. The first of these lines that names `label`, in any case, is the header; each line that equals it, in any
    file of a folder, is no row. Without a header the order is Criteo's: label, I1 to I13, C1 to C26.

    Raises:
        DataError: the header lacks columns.
    """
    if _is_parquet(spark, path):
        return spark.read.parquet(path)
    first = spark.read.text(path).where(F.trim("value") != "").limit(_FIRST_LINES).collect()
    lines = [row[0].removeprefix("\ufeff") for row in first]
    delimiter = _delimiter(lines)
    names = {name.lower(): name for name in COLUMNS}
    header = next((line for line in lines if LABEL in _header_fields(line, delimiter)), None)
    if header is not None:
        fields = [names.get(field.lower(), field) for field in _header_fields(header, delimiter, lower=False)]
        if missing := [name for name in COLUMNS if name not in fields]:
            raise DataError(
                f"Criteo data needs the columns label, I1 to I13 and C1 to C26; the header of {path!r} lacks "
                f"{missing}. Received: header {fields}"
            )
    else:
        fields = list(COLUMNS)
    schema = StructType([StructField(name, StringType()) for name in [*fields, _CORRUPT]])
    rows = (
        spark.read.schema(schema)
        .option("sep", delimiter)
        # Not Spark's header option: it takes the first line of every file, whatever it holds.
        .option("header", False)
        .option(
            "columnPruning", False
        )  # with it, a row is malformed or not by the columns that a query reads
        .option("mode", "PERMISSIVE")
        .option("columnNameOfCorruptRecord", _CORRUPT)
        .csv(path)
    )
    if header is None:
        return rows
    named = [
        F.lower(F.trim(F.regexp_replace(quoted(field), '^\ufeff|"', ""))).eqNullSafe(field.lower())
        for field in COLUMNS
    ]
    return rows.where(~reduce(and_, named))


def _delimiter(lines: Sequence[str]) -> str:
    """Tab or comma: which of them makes 40 fields of more lines, else which occurs in more."""

    def fit(delimiter: str) -> tuple[int, int]:
        whole = sum(line.count(delimiter) == len(COLUMNS) - 1 for line in lines)
        return whole, sum(delimiter in line for line in lines)

    return max("\t,", key=fit)  # the tab, where they are equal


def _header_fields(line: str, delimiter: str, *, lower: bool = True) -> list[str]:
    fields = [field.strip().strip('"') for field in line.split(delimiter)]
    return [field.lower() for field in fields] if lower else fields


def _is_parquet(spark: SparkSession, path: str) -> bool:
    first = (
        spark.read.format("binaryFile")
        .option("pathGlobFilter", "*.parquet")
        .load(path)
        .select("path")
        .first()
    )
    return first is not None


def _parse(raw: DataFrame, keep: Sequence[str]) -> DataFrame:
    """Typed columns, and MALFORMED: the text of a malformed row, null for a good one."""
    missing = [name for name in [*COLUMNS, *keep] if name not in raw.columns]
    if missing:
        raise DataError(
            f"Criteo data needs the columns label, I1 to I13 and C1 to C26: {missing} are missing. "
            f"Received: columns {raw.columns}"
        )
    bad = F.col(_CORRUPT).isNotNull() if _CORRUPT in raw.columns else F.lit(False)
    numbers = {name: _number(raw, name) for name in (LABEL, *INTEGER_COLUMNS)}
    for name in INTEGER_COLUMNS:
        bad = bad | (_blank_as_null(raw, name).isNotNull() & numbers[name].isNull())
    bad = bad | ~F.coalesce(numbers[LABEL].isin(0.0, 1.0), F.lit(False))
    text = F.concat_ws("|", *[F.coalesce(quoted(name).cast("string"), F.lit("")) for name in COLUMNS])
    if _CORRUPT in raw.columns:
        text = F.coalesce(F.col(_CORRUPT), text)
    return raw.select(
        *[numbers[name].alias(name) for name in (LABEL, *INTEGER_COLUMNS)],
        *[_blank_as_null(raw, name).alias(name) for name in CATEGORY_COLUMNS],
        *[quoted(name) for name in keep],
        F.when(bad, text).alias(MALFORMED),
    )


def _number(raw: DataFrame, name: str) -> Column:
    if isinstance(raw.schema[name].dataType, NumericType):
        return quoted(name).cast("double")
    return F.expr(f"try_cast(trim(`{name}`) AS double)")


def _blank_as_null(raw: DataFrame, name: str) -> Column:
    column = quoted(name).cast("string")
    return F.when(F.trim(column) != "", column)
