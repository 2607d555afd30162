"""init_session on a real cluster: this Python and BigDL's classes are on every executor."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from deeprec_spark.session import find_jars

if TYPE_CHECKING:
    from tests.conftest import RunPython

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

CHILD = """
import sys
from deeprec_spark.session import SessionOptions, init_session
from deeprec_spark.features.friesian import to_friesian
from deeprec_spark.features.table import FeatureTable
from deeprec_spark.udfs import register_udfs

conf = {
    "spark.master": sys.argv[1],
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.cores.max": "2",
    "spark.sql.shuffle.partitions": "2",
}
spark = init_session(SessionOptions(conf, bigdl=sys.argv[2] == "bigdl"))
workers = spark.sparkContext.parallelize(range(4), 4).map(lambda _: __import__("sys").executable)
print("python:", set(workers.collect()))
rows = [("a", 1, 1.5), ("b", 2, None), ("a", 3, 2.5)]
table = FeatureTable(spark.createDataFrame(rows, "s string, i long, d double").repartition(2))
register_udfs(spark)
hashes = table.hash_encode64("s").select("s").distinct().size()
print("hash:", hashes, spark.sql("SELECT fingerprint64('a')").first()[0])
if sys.argv[2] == "bigdl":
    theirs = to_friesian(table)  # its functions run in the executors' JVMs
    print("index:", sorted(theirs.gen_string_idx("s").to_dict()))
    print("filled:", sorted(row["d"] for row in theirs.fillna(0.0, ["d"]).df.collect()))
    print("history:", theirs.add_hist_seq(["d"], "s", "i").df.count())
    print("medians:", theirs.fill_median(["d"]).df.count(), theirs.clip(["i"], max=2).df.count())
    print("negatives:", theirs.cast(["i"], "int").add_negative_samples(10, "i").df.count())
spark.stop()
"""


def test_friesians_functions_and_this_python_on_executors(
    standalone_cluster: str, run_python: RunPython
) -> None:
    bigdl = "bigdl" if find_jars() else "none"
    done = run_python(CHILD, standalone_cluster, bigdl, env={"SPARK_LOCAL_IP": "127.0.0.1"})
    assert f"python: {{{sys.executable!r}}}" in done.stdout
    assert "hash: 2 -5528939962900187677" in done.stdout
    if bigdl == "bigdl":
        assert "index: ['a', 'b']" in done.stdout
        assert "filled: [0.0, 1.5, 2.5]" in done.stdout
        assert "history: 1" in done.stdout
        assert "medians: 3 3" in done.stdout
        assert "negatives: 6" in done.stdout
