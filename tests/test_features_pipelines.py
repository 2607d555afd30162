"""Criteo, MovieLens and generated data to prepared Parquet."""

from __future__ import annotations

import json
import logging
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import farmhash
import numpy as np
import pandas as pd
import pytest

from deeprec_spark.features.criteo import COLUMNS, criteo_spec, prepare_criteo, read_criteo
from deeprec_spark.features.movielens import prepare_movielens
from deeprec_spark.features.output import MalformedDataError
from deeprec_spark.features.planted import exact_auc, planted_rows
from deeprec_spark.features.prepare import DataError, EmptyDataError
from deeprec_spark.features.spec import FeatureSpec
from deeprec_spark.features.synthetic import generate_criteo, planted_auc

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def expected_hash(text: str) -> int:
    return int(np.uint64(farmhash.fingerprint64(text)).astype(np.int64))


def read(path: Path) -> pd.DataFrame:
    return pd.concat([pd.read_parquet(path / "train"), pd.read_parquet(path / "test")], ignore_index=True)


def line(label: str, separator: str = "\t", **fields: str) -> str:
    return separator.join([label, *[fields.get(name, "") for name in COLUMNS[1:]]])


def criteo_file(path: Path, lines: list[str]) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(("separator", "header"), [("\t", False), (",", True), (",", False)])
def test_criteo_with_and_without_header(
    spark: SparkSession, tmp_path: Path, separator: str, header: bool
) -> None:
    lines = [
        line("1", separator, I1="3", I2="-2", C1="68fd1e64", C26="é"),
        line("0", separator, I1="260.0", C1=" "),
    ]
    path = criteo_file(tmp_path / "raw", [separator.join(COLUMNS).upper()] * header + lines)
    spec = prepare_criteo(spark, path, str(tmp_path / "out"))
    assert spec == criteo_spec() == FeatureSpec.load(tmp_path / "out" / "feature_spec.json")
    rows = read(tmp_path / "out").sort_values("label", ascending=False)
    assert list(rows.columns) == [*spec.feature_names, "label"]
    assert rows["I1"].tolist() == pytest.approx([math.log(4), math.log(261)], rel=1e-6)
    assert rows["I2"].tolist() == [0.0, 0.0]
    assert rows["C1"].tolist() == [expected_hash("68fd1e64"), expected_hash("")]
    assert rows["C26"].tolist() == [expected_hash("é"), expected_hash("")]
    assert rows.dtypes[["I1", "C1", "label"]].astype(str).tolist() == ["float32", "int64", "float32"]


def test_malformed_criteo_rows_are_counted_or_an_error(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = [line(str(index % 2), I1=str(index)) for index in range(8)]
    bad = ["1\t2\t3", line("1") + "\textra", line("2"), line("", I1="1"), line("0", I3="many"), ""]
    path = criteo_file(tmp_path / "raw", good + bad)
    with pytest.raises(MalformedDataError, match=r"at most 1\.00%.*Received: 5 of 13"):
        prepare_criteo(spark, path, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    with caplog.at_level(logging.WARNING):
        prepare_criteo(spark, path, str(tmp_path / "out"), max_malformed=0.5)
    assert "5 of 13 Criteo rows are malformed and left out" in caplog.text
    assert len(read(tmp_path / "out")) == 8
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["rows"], report["malformed"], report["nulls"]["I2"]) == (8, 5, 8)


@pytest.mark.parametrize(
    ("separator", "first"), [("\t", "a,b"), ("\t", ""), (",", "a\tb"), (",", ",,,"), (",", " ")]
)
def test_the_delimiter_is_not_told_from_a_malformed_first_line(
    spark: SparkSession, tmp_path: Path, separator: str, first: str
) -> None:
    good = [line(str(index % 2), separator, I1=str(index), C1="x") for index in range(3)]
    parsed = read_criteo(spark, criteo_file(tmp_path / "raw", [first, *good])).collect()
    assert [row["I1"] for row in parsed if row["C1"] == "x"] == ["0", "1", "2"]
    prepare_criteo(spark, str(tmp_path / "raw"), str(tmp_path / "out"), max_malformed=0.5)
    assert len(read(tmp_path / "out")) == 3
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["malformed"] == (1 if first.strip() else 0)


def test_a_header_in_some_files_of_a_folder_eats_no_row(spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "raw"
    folder.mkdir()
    header = ",".join(f'"{name}"' for name in COLUMNS)
    criteo_file(folder / "a.csv", ["", "\ufeff" + header, line("1", ",", I1="1")])
    criteo_file(folder / "b.csv", [line("0", ",", I1="2"), line("1", ",", I1="3")])
    criteo_file(folder / "c.csv", [header, line("0", ",", I1="4")])
    assert sorted(row["I1"] for row in read_criteo(spark, str(folder)).collect()) == ["1", "2", "3", "4"]
    prepare_criteo(spark, str(folder), str(tmp_path / "out"))
    assert len(read(tmp_path / "out")) == 4
    assert json.loads((tmp_path / "out" / "report.json").read_text())["malformed"] == 0


def test_criteo_that_is_none(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"lacks \['C26'\]"):
        read_criteo(spark, criteo_file(tmp_path / "short", ["\t".join(COLUMNS[:-1])]))
    with pytest.raises(DataError, match=r"\['C1'\] are missing"):
        prepare_criteo(
            spark,
            spark.createDataFrame([(1,)], "label int").selectExpr(
                "label", *[f"1 AS {name}" for name in COLUMNS[1:] if name != "C1"]
            ),
            str(tmp_path / "out"),
        )
    with pytest.raises(EmptyDataError):
        prepare_criteo(spark, criteo_file(tmp_path / "empty", ["\t".join(COLUMNS)]), str(tmp_path / "out"))
    with pytest.raises(Exception, match="PATH_NOT_FOUND"):
        prepare_criteo(spark, str(tmp_path / "absent"), str(tmp_path / "out"))


def test_the_shared_criteo_sample(spark: SparkSession, tmp_path: Path, test_data: Path) -> None:
    prepare_criteo(spark, str(test_data / "criteo_sample.csv"), str(tmp_path))
    raw = pd.read_csv(test_data / "criteo_sample.csv", dtype=str, keep_default_na=False)
    rows = read(tmp_path)
    assert len(rows) == len(raw) == 200
    assert rows["label"].sum() == (raw["label"] == "1").sum()
    assert sorted(rows["C1"]) == sorted(expected_hash(value) for value in raw["C1"])
    counts = pd.to_numeric(raw["I2"], errors="coerce").fillna(0).clip(lower=0)
    np.testing.assert_allclose(np.sort(rows["I2"]), np.sort(np.log1p(counts)), rtol=1e-6)


@pytest.fixture
def movielens(tmp_path: Path) -> Path:
    folder = tmp_path / "ml"
    folder.mkdir()
    ratings = [(1, 10, 5, 100), (1, 11, 3, 100), (1, 10, 2, 50), (2, 11, 1, 70), (2, 99, 4, 80)]
    (folder / "u.data").write_text("".join("\t".join(map(str, row)) + "\n" for row in ratings))
    (folder / "u.user").write_text("1|24|M|technician|85711\n2|59|F|writer|T8H1N\n")
    flags = {10: [1, 5], 11: [0]}
    lines = [
        f'{item}|Caf\xe9 "{item}"|01-Jan-1995||url|'
        + "|".join("1" if i in on else "0" for i in range(19))
        + "\n"
        for item, on in flags.items()
    ]
    (folder / "u.item").write_bytes("".join(lines).encode("iso-8859-1"))
    return folder


def test_movielens_features(spark: SparkSession, tmp_path: Path, movielens: Path) -> None:
    spec = prepare_movielens(spark, str(movielens), str(tmp_path / "out"), history_length=2)
    assert spec.feature_names == ["user", "item", "gender", "occupation", "age", "zip", "genres", "history"]
    rows = read(tmp_path / "out")
    by_key = {(row.user, row.item, row.label): row for row in rows.itertuples()}
    assert len(by_key) == 5
    film = by_key[1, 10, 1.0]
    assert film.gender == expected_hash("M")
    assert film.zip == expected_hash("857")
    assert film.age == 4
    assert film.genres.tolist() == [expected_hash("Action"), expected_hash("Comedy")]
    assert by_key[1, 11, 0.0].history.tolist() == [10]  # of the same moment: not yet known
    assert by_key[2, 11, 0.0].history.tolist() == []
    unknown = by_key[2, 99, 1.0]
    assert (unknown.genres.tolist(), unknown.history.tolist()) == ([], [11])


def test_movielens_histories_are_no_part_of_a_group(
    spark: SparkSession, tmp_path: Path, movielens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They grow with each rating: on the user's side they would make a group of each rating."""
    make = partial(
        prepare_movielens, spark, str(movielens), test_fraction=0.0, history_length=2, group_by=["user"]
    )
    spec = make(out=str(tmp_path / "default"))
    assert spec.grouping is not None
    assert spec.grouping.features == ("user", "gender", "occupation", "age", "zip")
    assert sorted(map(len, pd.read_parquet(tmp_path / "default" / "train")["item"])) == [2, 3]
    assert "samples on average" not in caplog.text
    make(out=str(tmp_path / "asked"), group_features=["user", "history"])
    [text] = [message for message in caplog.messages if "samples on average" in message]
    assert text.startswith("Groups hold 1.25 samples on average (5 samples in about 4 groups)")
    assert "'history' makes about 4 groups of them. Leave them out of group_features" in text


def test_movielens_split_by_time_takes_the_last(spark: SparkSession, tmp_path: Path, movielens: Path) -> None:
    prepare_movielens(spark, str(movielens), str(tmp_path / "out"), split="time", test_fraction=0.5)
    assert sorted(pd.read_parquet(tmp_path / "out" / "train")["item"]) == [10, 11, 99]
    assert sorted(pd.read_parquet(tmp_path / "out" / "test")["item"]) == [10, 11]


def test_movielens_with_a_malformed_first_line(
    spark: SparkSession, tmp_path: Path, movielens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = movielens / "u.data"
    data.write_text("196 242 3\n" + data.read_text() + "3\t4\t9\t1\n")
    with pytest.raises(MalformedDataError, match="196 242 3"):
        prepare_movielens(spark, str(movielens), str(tmp_path / "out"))
    prepare_movielens(spark, str(movielens), str(tmp_path / "out"), max_malformed=0.5)
    assert "2 of 7 ratings are malformed" in caplog.text
    assert len(read(tmp_path / "out")) == 5


def test_movielens_ids_that_come_again_multiply_no_rating(
    spark: SparkSession, tmp_path: Path, movielens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    users, items = movielens / "u.user", movielens / "u.item"
    users.write_text(users.read_text() + "1|60|F|doctor|00000\n")
    items.write_bytes(items.read_bytes() + b"10|Other||||" + b"|".join([b"0"] * 18 + [b"1"]) + b"\n")
    with pytest.raises(
        MalformedDataError, match=r"malformed users.*Received: 1 of 3, such as .*user 1 again"
    ):
        prepare_movielens(spark, str(movielens), str(tmp_path / "out"))
    prepare_movielens(spark, str(movielens), str(tmp_path / "out"), max_malformed=0.5)
    assert "1 of 3 items are malformed" in caplog.text
    assert json.loads((tmp_path / "out" / "report.json").read_text())["malformed"] == 2
    rows = read(tmp_path / "out")
    assert len(rows) == 5
    assert set(rows[rows["user"] == 1]["gender"]) == {expected_hash("M")}
    films = rows[rows["item"] == 10]["genres"]
    assert {tuple(genres) for genres in films} == {(expected_hash("Action"), expected_hash("Comedy"))}


def test_movielens_1m(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "ratings.dat").write_text("1::1193::5::978300760\n1::661::3::978302109\n")
    (tmp_path / "users.dat").write_text("1::F::1::10::48067\n")
    (tmp_path / "movies.dat").write_text("1193::One (1975)::Drama\n661::James (1996)::Animation|Children's\n")
    prepare_movielens(spark, str(tmp_path), str(tmp_path / "out"))
    rows = read(tmp_path / "out").set_index("item")
    assert rows.loc[661, "genres"].tolist() == [expected_hash("Animation"), expected_hash("Children's")]
    assert rows.loc[1193, "gender"] == expected_hash("F")
    with pytest.raises(DataError, match=r"ratings\.dat.*Received"):
        prepare_movielens(spark, str(tmp_path / "out"), str(tmp_path / "x"))


def test_the_shared_movielens_data(spark: SparkSession, tmp_path: Path, test_data: Path) -> None:
    prepare_movielens(spark, str(test_data / "ml-100k"), str(tmp_path))
    train, test = (pd.read_parquet(tmp_path / part) for part in ("train", "test"))
    assert len(train) + len(test) == 100_000
    assert abs(len(test) / 100_000 - 0.2) < 0.005
    both = pd.concat([train, test])
    assert both["user"].nunique() == 943
    assert both["item"].nunique() == 1682
    assert both["occupation"].nunique() == 21
    ratings = pd.read_csv(test_data / "ml-100k" / "u.data", sep="\t", header=None)
    assert both["label"].sum() == (ratings[2] >= 4).sum()


def test_generated_data_in_both_formats_is_the_planted_data(spark: SparkSession, tmp_path: Path) -> None:
    clicks = generate_criteo(spark, 2000, seed=1, partitions=3)
    planted = planted_rows(np.arange(2000), seed=1)
    assert [row["label"] for row in clicks.select("label").collect()] == planted.label.tolist()
    best = exact_auc(planted.label, planted.probability)

    generate_criteo(spark, 2000, seed=1, out=str(tmp_path / "tsv"), data_format="tsv")
    truth = json.loads((tmp_path / "tsv" / "truth.json").read_text())
    assert truth == {"rows": 2000, "seed": 1, "best_auc": pytest.approx(best)}
    prepare_criteo(spark, str(tmp_path / "tsv" / "data"), str(tmp_path / "from_tsv"))
    prepare_criteo(spark, clicks, str(tmp_path / "from_frame"), keep=["probability"])
    from_tsv, from_frame = read(tmp_path / "from_tsv"), read(tmp_path / "from_frame")
    names = criteo_spec().feature_names
    pd.testing.assert_frame_equal(
        from_tsv[names].sort_values(names, ignore_index=True),
        from_frame[names].sort_values(names, ignore_index=True),
    )
    assert exact_auc(from_frame["label"], from_frame["probability"]) == pytest.approx(best)
    assert 0.7 < planted_auc(spark, str(tmp_path / "from_frame" / "test")) < 0.95
    with pytest.raises(DataError, match="keep="):
        planted_auc(spark, str(tmp_path / "from_tsv" / "test"))


def test_further_rows_have_the_same_truth(spark: SparkSession) -> None:
    later = generate_criteo(spark, 5, seed=1, first_row=100).select("probability").collect()
    expected = planted_rows(np.arange(100, 105), seed=1).probability
    assert [row["probability"] for row in later] == pytest.approx(expected.tolist())
    with pytest.raises(DataError, match=r"test_fraction=1\.0"):
        prepare_criteo(spark, "never read", "never written", test_fraction=1.0)
    with pytest.raises(DataError, match="rows=0"):
        generate_criteo(spark, 0)
