"""MovieLens ratings to prepared features: user and item ids, their attributes, genres, history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812 - the name that Spark's documentation uses
from pyspark.sql.types import StringType, StructField, StructType

from deeprec_spark.features.output import MALFORMED, check_fraction, check_malformed, write_splits
from deeprec_spark.features.prepare import DataError, PrepareReport, prepare_dataframe
from deeprec_spark.features.spec import Feature, FeatureKind, FeatureSpec, Label

LABEL = "label"
GENRES = (
    "unknown",
    "Action",
    "Adventure",
    "Animation",
    "Children's",
    "Comedy",
    "Crime",
    "Documentary",
    "Drama",
    "Fantasy",
    "Film-Noir",
    "Horror",
    "Musical",
    "Mystery",
    "Romance",
    "Sci-Fi",
    "Thriller",
    "War",
    "Western",
)
_MAX_GENRES = 8  # no film of MovieLens has more than 6
_LONG_AGO = -(2**62)

__all__ = ["GENRES", "LABEL", "movielens_spec", "prepare_movielens", "read_movielens"]


def movielens_spec(history_length: int = 0) -> FeatureSpec:
    """The features of MovieLens data.

    `history`, where `history_length` is above 0, holds the ids of the films that the user had rated before,
    oldest first; it shares the table of `item`.
    """

    def hashed(name: str, group: Literal["user", "item"]) -> Feature:
        return Feature(name=name, kind=FeatureKind.CATEGORICAL, raw_type="string", default="", group=group)

    def number(name: str, group: Literal["user", "item"]) -> Feature:
        return Feature(name=name, kind=FeatureKind.CATEGORICAL, raw_type="int64", default=-1, group=group)

    features = [
        number("user", "user"),
        number("item", "item"),
        hashed("gender", "user"),
        hashed("occupation", "user"),
        number("age", "user"),
        hashed("zip", "user"),
        Feature(
            name="genres",
            kind=FeatureKind.SEQUENCE,
            raw_type="string",
            max_length=_MAX_GENRES,
            group="item",
        ),
    ]
    if history_length:
        features.append(
            Feature(
                name="history",
                kind=FeatureKind.SEQUENCE,
                raw_type="int64",
                max_length=history_length,
                table="item",
                group="user",
            )
        )
    return FeatureSpec(features=tuple(features), labels=(Label(name=LABEL),))


def prepare_movielens(
    spark: SparkSession,
    path: str,
    out: str,
    *,
    split: Literal["hash", "time"] = "hash",
    test_fraction: float = 0.2,
    history_length: int = 0,
    max_malformed: float = 0.01,
    group_by: Sequence[str] | None = None,
    group_features: Sequence[str] | None = None,
) -> FeatureSpec:
    """Prepare a MovieLens folder: `<out>/train` and `<out>/test` as Parquet, `feature_spec.json`, `report.json`.

    The label is 1 for ratings of 4 and 5. Ages are in steps of 5 years, zip codes are their first 3 characters.

    Args:
        spark: the session.
        path: the folder of MovieLens 100K (`u.data`, `u.user`, `u.item`) or 1M (`ratings.dat`, ...).
        out: a folder, local or of any file system that Spark knows; overwritten.
        split: "hash" draws the test set by a hash of (user, item); "time" takes the last ratings.
        test_fraction: share of the ratings in the test set.
        history_length: longest history, 0 for none.
        max_malformed: a rating is malformed if it has not four numbers, or is not from 1 to 5; a user or an item
            if its id is that of an earlier line. Malformed rows are left out and counted; more than this share
            of ratings, of users or of items is an error.
        group_by: store the samples in groups by these columns, such as `["user"]`; None: flat.
        group_features: features stored once for a group; None: those of the user but for the history, which differs
            from rating to rating.

    Returns:
        The spec that was written.

    Raises:
        DataError: the folder is none of MovieLens.
        MalformedDataError: too many malformed rows; the message quotes some.

    Example:
        >>> prepare_movielens(spark, "ml-100k", "prepared", history_length=50).feature_names[-1]
        'history'
    """
    if split not in ("hash", "time"):
        raise DataError(f"split must be 'hash' or 'time'. Received: split={split!r}")
    check_fraction(test_fraction)
    ratings, users, items = read_movielens(spark, path)
    report = PrepareReport()
    good = []
    for rows, what in ((ratings, "ratings"), (users, "users"), (items, "items")):
        report.malformed += check_malformed(rows, max_malformed, what)
        good.append(rows.where(F.col(MALFORMED).isNull()).drop(MALFORMED))
    ratings, users, items = good
    if history_length:
        ratings = ratings.withColumn("history", _history(history_length))
    rows = (
        ratings.join(F.broadcast(users), "user", "left")
        .join(F.broadcast(items), "item", "left")
        .withColumn(LABEL, (F.col("rating") >= 4).cast("float"))
        .withColumn("__test__", _is_test(ratings, split, test_fraction))
    )
    spec = movielens_spec(history_length)
    if group_by:
        of_user = [
            feature.name for feature in spec.features if feature.group == "user" and feature.name != "history"
        ]
        spec = spec.grouped(group_by, group_features or of_user)
    if history_length:
        # The window has sorted the rows by user and time, ties as they came: give them one order, and a mixed one.
        rows = rows.sortWithinPartitions(F.xxhash64("user", "item", "time"), "user", "item")
    prepared = prepare_dataframe(rows, spec, keep=["__test__"], group=False, report=report)
    write_splits(prepared, "__test__", out, spec, report)
    return spec


def read_movielens(spark: SparkSession, path: str) -> tuple[DataFrame, DataFrame, DataFrame]:
    """Read ratings (user, item, rating, time), users and items, each with the text of its malformed rows."""
    names = {
        row["path"].rsplit("/", 1)[-1]
        for row in spark.read.format("binaryFile")
        .option("pathGlobFilter", "{u.data,u.user,u.item,ratings.dat,users.dat,movies.dat}")
        .load(path)
        .select("path")
        .collect()
    }
    if {"u.data", "u.user", "u.item"} <= names:
        return _read_100k(spark, path)
    if {"ratings.dat", "users.dat", "movies.dat"} <= names:
        return _read_1m(spark, path)
    raise DataError(
        "A MovieLens folder holds u.data, u.user and u.item (100K) or ratings.dat, users.dat and movies.dat (1M). "
        f"Received: {path!r} with {sorted(names)}"
    )


def _read_100k(spark: SparkSession, path: str) -> tuple[DataFrame, DataFrame, DataFrame]:
    users = _table(spark, f"{path}/u.user", "|", ["user", "age", "gender", "occupation", "zip"])
    flags = [f"genre{i}" for i in range(len(GENRES))]
    items = _table(spark, f"{path}/u.item", "|", ["item", "title", "released", "video", "url", *flags])
    genres = F.filter(
        F.array(
            *[F.when(F.col(flag) == "1", F.lit(genre)) for flag, genre in zip(flags, GENRES, strict=True)]
        ),
        lambda genre: genre.isNotNull(),
    )
    return (
        _ratings(spark, f"{path}/u.data", "\t"),
        _users(users),
        _first_of_each(items.select(_integer("item").alias("item"), genres.alias("genres")), "item"),
    )


def _read_1m(spark: SparkSession, path: str) -> tuple[DataFrame, DataFrame, DataFrame]:
    users = _table(spark, f"{path}/users.dat", "::", ["user", "gender", "age", "occupation", "zip"])
    items = _table(spark, f"{path}/movies.dat", "::", ["item", "title", "genres"])
    return (
        _ratings(spark, f"{path}/ratings.dat", "::"),
        _users(users),
        _first_of_each(
            items.select(_integer("item").alias("item"), F.split("genres", r"\|").alias("genres")), "item"
        ),
    )


def _table(spark: SparkSession, path: str, separator: str, names: list[str]) -> DataFrame:
    schema = StructType([StructField(name, StringType()) for name in names])
    reader = spark.read.schema(schema).option("sep", separator).option("quote", "")
    return reader.option("encoding", "ISO-8859-1").csv(path)


def _users(users: DataFrame) -> DataFrame:
    chosen = users.select(
        _integer("user").alias("user"),
        "gender",
        "occupation",
        F.floor(_integer("age") / 5).alias("age"),
        F.substring("zip", 1, 3).alias("zip"),
    )
    return _first_of_each(chosen, "user")


def _first_of_each(rows: DataFrame, key: str) -> DataFrame:
    """MALFORMED for the rows whose id an earlier line has: they would multiply the ratings that they join."""
    order = Window.partitionBy(key).orderBy("__line__")
    again = F.col(key).isNotNull() & (F.row_number().over(order) > 1)
    lines = rows.withColumn("__line__", F.monotonically_increasing_id())
    text = F.concat(F.lit(f"{key} "), F.col(key).cast("string"), F.lit(" again"))
    return lines.withColumn(MALFORMED, F.when(again, text)).drop("__line__")


def _ratings(spark: SparkSession, path: str, separator: str) -> DataFrame:
    """Read as text: a line that lacks fields or has other separators must be seen, not guessed at."""
    lines = spark.read.text(path)
    fields = lines.select("value", F.split("value", separator, -1).alias("field"))
    columns = [F.expr(f"try_cast(get(field, {i}) AS bigint)") for i in range(4)]
    parsed = fields.select(
        *[
            column.alias(name)
            for column, name in zip(columns, ("user", "item", "rating", "time"), strict=True)
        ],
        F.size("field").alias("fields"),
        "value",
    )
    good = (
        (F.col("fields") == 4)
        & F.col("user").isNotNull()
        & F.col("item").isNotNull()
        & F.col("time").isNotNull()
        & F.coalesce(F.col("rating").between(1, 5), F.lit(False))
    )
    return parsed.select("user", "item", "rating", "time", F.when(~good, F.col("value")).alias(MALFORMED))


def _integer(name: str) -> Column:
    return F.expr(f"try_cast(trim({name}) AS bigint)")


def _history(length: int) -> Column:
    """The films that the user rated before this moment, oldest first; of one moment, by film id."""
    before = Window.partitionBy("user").orderBy("time").rangeBetween(_LONG_AGO, -1)
    events = F.array_sort(F.collect_list(F.struct("time", "item")).over(before))
    last = F.slice(events, F.greatest(F.size(events) - length, F.lit(0)) + 1, length)
    return F.transform(last, lambda event: event["item"])


def _is_test(ratings: DataFrame, split: str, fraction: float) -> Column:
    if split == "hash":
        return F.pmod(F.xxhash64("user", "item"), F.lit(1_000_000)) < round(fraction * 1_000_000)
    moment = ratings.agg(F.percentile("time", F.lit(1 - fraction))).collect()[0][0]
    return F.col("time") > F.lit(moment)
