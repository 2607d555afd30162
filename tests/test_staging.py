"""Staging: every kind of data as prepared Parquet."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from deeprec_spark.data.creator import write_shard
from deeprec_spark.data.reader import BatchReader, ReaderOptions, Work
from deeprec_spark.features.labels import LabelKinds
from deeprec_spark.features.prepare import DataError, is_prepared, prepare_dataframe
from deeprec_spark.features.spec import Feature, FeatureKind, FeatureSpec, Label
from deeprec_spark.staging import DataColumns, StagedData, Staging, find_spec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = DataColumns(["city", "price"], ["y"])
SPEC = FeatureSpec(
    features=(
        Feature(name="city", kind=FeatureKind.CATEGORICAL, raw_type="string"),
        Feature(name="price", kind=FeatureKind.DENSE, raw_type="float32", transform="log1p"),
    ),
    labels=(Label(name="y"),),
)


@pytest.fixture(scope="module")
def frame(spark: SparkSession) -> DataFrame:
    return spark.createDataFrame(
        [("Oslo", 1.0, 0, 2.0), ("Rom", 3.0, 1, 1.0), (None, None, 1, 0.5)],
        "city string, price double, y int, w double",
    )


def read(staged: StagedData) -> pd.DataFrame:
    return pq.read_table(staged.location).to_pandas().sort_values("price").reset_index(drop=True)


def test_dataframe_is_prepared_and_removed_afterwards(
    spark: SparkSession, frame: DataFrame, tmp_path: Path
) -> None:
    columns = DataColumns(["city", "price"], ["y"], "w")
    with Staging(spark, str(tmp_path), label_kinds=LabelKinds(("binary",))) as staging:
        staged = staging.stage(frame, columns)
        assert staged.dataset.num_rows == 3
        assert staged.sample_weight == "w"
        assert [label.kind for label in staged.spec.labels] == ["binary"]
        table = read(staged)
        assert list(table.columns) == ["city", "price", "y", "w"]
        assert table["price"].tolist() == [0.0, 1.0, 3.0]
        assert table["w"].tolist() == [0.5, 2.0, 1.0]
        assert table["city"].dtype == np.int64
        assert table["city"].nunique() == 3
    assert list(tmp_path.iterdir()) == []


def test_prepared_columns_are_not_prepared_again(
    spark: SparkSession, frame: DataFrame, tmp_path: Path
) -> None:
    """By way of Parquet too: no hash of a hash, no logarithm of a logarithm."""
    once = prepare_dataframe(frame, SPEC)
    assert is_prepared(once, SPEC)
    assert not is_prepared(frame, SPEC)
    path = str(tmp_path / "once")
    once.write.parquet(path)
    expected = spark.read.parquet(path).orderBy("price").collect()
    assert [round(row["price"], 5) for row in expected] == [0.0, 0.69315, 1.38629]
    with Staging(spark, str(tmp_path / "staging")) as staging:
        staged = staging.stage(spark.read.parquet(path), COLUMNS, spec=SPEC)
        again = read(staged)
    assert again["city"].tolist() == [row["city"] for row in expected]
    assert again["price"].tolist() == [row["price"] for row in expected]
    mixed = spark.read.parquet(path).withColumnRenamed("price", "p").selectExpr("city", "p as price", "y")
    half = mixed.withColumn("price", mixed["price"] + 0)
    with pytest.raises(DataError, match=r"prepared \['city'\], raw \['price'\]"):
        prepare_dataframe(half, SPEC)


def test_a_path_beside_a_spec_is_read_in_place(spark: SparkSession, frame: DataFrame, tmp_path: Path) -> None:
    prepare_dataframe(frame, SPEC).write.parquet(str(tmp_path / "train"))
    SPEC.save(tmp_path / "feature_spec.json")
    assert find_spec(str(tmp_path / "train")) == SPEC
    with Staging(spark, str(tmp_path / "staging")) as staging:
        staged = staging.stage(str(tmp_path / "train"), DataColumns())
        assert staged.location == str(tmp_path / "train")
        assert staged.spec == SPEC
    assert (tmp_path / "train").is_dir()
    assert not (tmp_path / "staging").exists()


def test_a_path_without_a_spec_is_prepared(spark: SparkSession, frame: DataFrame, tmp_path: Path) -> None:
    frame.write.parquet(str(tmp_path / "raw"))
    with Staging(spark, str(tmp_path / "staging")) as staging:
        staged = staging.stage(str(tmp_path / "raw"), COLUMNS)
        assert read(staged)["price"].tolist() == [0.0, 1.0, 3.0]


def test_feature_table_is_its_dataframe(spark: SparkSession, frame: DataFrame, tmp_path: Path) -> None:
    from deeprec_spark.features.table import FeatureTable

    with Staging(spark, str(tmp_path)) as staging:
        staged = staging.stage(FeatureTable(frame), COLUMNS)
        assert read(staged)["y"].tolist() == [1.0, 0.0, 1.0]


def test_xshards_of_dicts(spark: SparkSession, tmp_path: Path) -> None:
    from deeprec_spark import orca

    if not orca.installed():
        pytest.skip("BigDL is not installed")
    orca.attach(spark)
    shards = orca.import_bigdl("bigdl.orca.data.shard").SparkXShards(
        spark.sparkContext.parallelize(
            [{"x": {"id": np.arange(3) + 10 * part}, "y": np.arange(3.0)} for part in range(2)], 2
        )
    )
    with Staging(spark, str(tmp_path)) as staging:
        staged = staging.stage(shards, DataColumns(["id"], ["y"]))
        table = pq.read_table(staged.location)
        assert sorted(table["id"].to_pylist()) == [0, 1, 2, 10, 11, 12]
        assert staged.spec.features[0].kind is FeatureKind.CATEGORICAL


def test_data_creator_runs_on_every_shard(spark: SparkSession, tmp_path: Path) -> None:
    def creator(config: dict[str, Any], batch_size: int) -> Iterator[Any]:
        for start in range(0, config["rows"], batch_size):
            yield {"id": np.arange(start, start + batch_size)}, np.zeros(batch_size)

    with Staging(spark, str(tmp_path), num_shards=2) as staging:
        staged = staging.stage(creator, DataColumns(), config={"rows": 40}, batch_size=10)
        assert len(list(Path(staged.location).iterdir())) == 2
        table = pq.read_table(staged.location)
        assert sorted(table["id"].to_pylist()) == list(range(40))
        with pytest.raises(ValueError, match="yielded no batch"):
            staging.stage(creator, DataColumns(), config={"rows": 0}, batch_size=10)
    assert list(tmp_path.iterdir()) == []


def test_attempts_of_a_creators_task_do_not_disturb_each_other(spark: SparkSession, tmp_path: Path) -> None:
    """As with speculation: in the middle of one attempt another one writes the same shard, which does not count."""

    def other(config: dict[str, Any], batch_size: int) -> Iterator[Any]:
        yield {"id": np.arange(1000, 1050)}, np.zeros(50)

    def creator(config: dict[str, Any], batch_size: int) -> Iterator[Any]:
        yield {"id": np.arange(10)}, np.zeros(10)
        [location] = tmp_path.glob("staging-*/0")
        write_shard(other, {}, 50, shard=0, num_shards=1, location=str(location))
        yield {"id": np.arange(10, 20)}, np.zeros(10)

    with Staging(spark, str(tmp_path)) as staging:
        staged = staging.stage(creator, DataColumns())
        parts = BatchReader(staged.spec, ReaderOptions(100)).batches(iter(staged.dataset.ranges))
        assert [i for batch, _ in parts for i in batch.features["id"].tolist()] == list(range(20))


def test_data_of_another_kind_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    with (
        Staging(spark, str(tmp_path)) as staging,
        pytest.raises(TypeError, match=r"data must be a DataFrame.*Received: int"),
    ):
        staging.stage(5, COLUMNS)


def test_no_rows_name_the_data(spark: SparkSession, frame: DataFrame, tmp_path: Path) -> None:
    prepare_dataframe(frame, SPEC).limit(0).write.parquet(str(tmp_path / "train"))
    SPEC.save(tmp_path / "feature_spec.json")
    with Staging(spark, str(tmp_path)) as staging, pytest.raises(ValueError, match=r"no rows.*train"):
        staging.stage(str(tmp_path / "train"), DataColumns())


def test_a_raw_path_is_prepared_by_the_given_spec(
    spark: SparkSession, frame: DataFrame, tmp_path: Path
) -> None:
    """A spec that lies beside raw rows, or is given, does not make them prepared."""
    frame.write.parquet(str(tmp_path / "raw"))
    SPEC.save(tmp_path / "feature_spec.json")
    with Staging(spark, str(tmp_path / "staging")) as staging:
        staged = staging.stage(str(tmp_path / "raw"), DataColumns())
        assert [round(price, 5) for price in read(staged)["price"]] == [0.0, 0.69315, 1.38629]


def test_columns_that_the_caller_names_are_used(
    spark: SparkSession, frame: DataFrame, tmp_path: Path
) -> None:
    prepare_dataframe(frame, SPEC, keep=["w"]).write.parquet(str(tmp_path / "train"))
    for data in (frame, str(tmp_path / "train")):
        with Staging(spark, str(tmp_path / "staging"), label_kinds=LabelKinds(("regression",))) as staging:
            staged = staging.stage(data, DataColumns(["price"], ["w"]), spec=SPEC)
            assert staged.spec.feature_names == ["price"]
            assert [(label.name, label.kind) for label in staged.spec.labels] == [("w", "regression")]
            with pytest.raises(ValueError, match=r"features of the spec.*unknown \['nope'\]"):
                staging.stage(data, DataColumns(["nope"]), spec=SPEC)
            with pytest.raises(ValueError, match=r"no column \['nope'\]"):
                staging.stage(data, DataColumns(None, ["nope"]), spec=SPEC)


@pytest.mark.parametrize(
    ("names", "kind"),
    [(["item", "tags"], "path"), (["user"], "path"), (["user", "item"], "frame")],
)
def test_groups_of_which_some_columns_are_wanted(
    spark: SparkSession, tmp_path: Path, names: list[str], kind: str
) -> None:
    """Samples are the same whether group-level features, item-level ones, or both are asked for."""
    rows = [(7, 1, [1, 2], 0.0, 0.5), (7, 2, [], 1.0, 1.0), (8, 3, [3], 0.0, 2.0)]
    raw = spark.createDataFrame(rows, "user long, item long, tags array<long>, y double, w double").coalesce(
        1
    )
    spec = FeatureSpec(
        features=(
            Feature(name="user", kind=FeatureKind.CATEGORICAL, raw_type="int64"),
            Feature(name="item", kind=FeatureKind.CATEGORICAL, raw_type="int64"),
            Feature(name="tags", kind=FeatureKind.SEQUENCE, raw_type="int64", max_length=2),
        ),
        labels=(Label(name="y"),),
    ).grouped(["user"], ["user"])
    path = str(tmp_path / "train")
    prepare_dataframe(raw, spec, keep=["w"]).write.parquet(path)
    spec.save(tmp_path / "feature_spec.json")
    data = path if kind == "path" else spark.read.parquet(path)
    with Staging(spark, str(tmp_path / "staging")) as staging:
        staged = staging.stage(data, DataColumns(names, sample_weight_col="w"), spec=spec)
        assert staged.spec.feature_names == names
        assert staged.dataset.num_samples == 3
        reader = BatchReader(staged.spec, ReaderOptions(10, sample_weight="w"))
        [batch] = [step.batch.flat() for step in reader.steps(Work(part) for part in staged.dataset.ranges)]
    assert batch.sample_weight is not None
    columns = {**batch.features, "y": batch.labels["y"], "w": batch.sample_weight}
    expected = {"user": [7, 7, 8], "item": [1, 2, 3], "tags": [[1, 2], [-1, -1], [3, -1]], "y": [0, 1, 0]}
    order = np.argsort(batch.sample_weight)
    for name, values in columns.items():
        assert values[order].tolist() == expected.get(name, [0.5, 1.0, 2.0])


def test_what_a_killed_driver_staged_is_removed(spark: SparkSession, tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(timeout=60)
    dead = tmp_path / f"staging-{socket.gethostname()}-{child.pid}-abc" / "0"
    alive = tmp_path / f"staging-{socket.gethostname()}-{os.getpid()}-abc" / "0"
    elsewhere = tmp_path / f"staging-another-host-{child.pid}-abc"
    for folder in (dead, alive, elsewhere, tmp_path / "checkpoints"):
        folder.mkdir(parents=True)
    with Staging(spark, str(tmp_path)):
        assert not dead.parent.exists()
    assert alive.is_dir()
    assert elsewhere.is_dir()
    assert (tmp_path / "checkpoints").is_dir()


def test_bad_sample_weights_are_counted(spark: SparkSession, frame: DataFrame, tmp_path: Path) -> None:
    wrong = frame.selectExpr("city", "price", "y", "case when y = 1 then null else -w end as w")
    with Staging(spark, str(tmp_path)) as staging, pytest.raises(ValueError, match=r"'w'.*Received: 3 rows"):
        staging.stage(wrong, DataColumns(["city"], ["y"], "w"))


def test_labels_of_a_creator_are_checked(spark: SparkSession, tmp_path: Path) -> None:
    def creator(config: dict[str, Any], batch_size: int) -> Iterator[Any]:
        yield np.arange(4), np.array([0, 1, 5, 0])

    kinds = LabelKinds(("binary",))
    with (
        Staging(spark, str(tmp_path), label_kinds=kinds) as staging,
        pytest.raises(Exception, match=r"Label 'y' must be in \[0, 1\].*1 rows"),
    ):
        staging.stage(creator, DataColumns())
