"""What of an executor's cores is a node's: by configuration, and on a real cluster."""

from __future__ import annotations

import json

import pytest

from deeprec_spark.platform.standalone import StandaloneCluster
from deeprec_spark.runtime.core_share import CoreShare, share_of
from deeprec_spark.runtime.processors import allowed_cpus
from tests.conftest import RunPython

EIGHT = {"spark.executor.cores": "8"}
YARN, STANDALONE = {"spark.master": "yarn"}, {"spark.master": "spark://host:7077"}


@pytest.mark.parametrize(
    ("conf", "nodes", "share"),
    [
        ({**EIGHT, "spark.executor.instances": "4"}, 4, CoreShare(8, 8, 1)),
        ({**EIGHT, "spark.executor.instances": "4"}, 8, CoreShare(4, 8, 2)),
        ({"spark.executor.cores": "4", "spark.executor.instances": "2"}, 16, CoreShare(1, 4, 4)),
        # Without a number of executors: by all cores of the application, or as if each executor were filled.
        ({**STANDALONE, **EIGHT, "spark.cores.max": "16"}, 2, CoreShare(8, 8, 1)),
        ({**STANDALONE, **EIGHT, "spark.cores.max": "16"}, 4, CoreShare(4, 8, 2)),
        (
            {**STANDALONE, **EIGHT, "spark.cores.max": "16", "spark.executor.instances": "9"},
            4,
            CoreShare(4, 8, 2),
        ),
        ({**YARN, **EIGHT, "spark.cores.max": "16"}, 2, CoreShare(4, 8, 2)),
        ({**EIGHT, "spark.task.cpus": "2"}, 4, CoreShare(2, 8, 4)),
        ({**EIGHT, "spark.task.cpus": "2", "spark.dynamicAllocation.enabled": "true"}, 2, CoreShare(4, 8, 2)),
        # Spark's own default, where there is one.
        ({**YARN, "spark.executor.instances": "4"}, 4, CoreShare(1, 1, 1)),
        ({"spark.master": "k8s://https://host"}, 3, CoreShare(1, 1, 1)),
        (STANDALONE, 3, CoreShare(1, None, 1)),
        ({}, 3, CoreShare(1, None, 1)),
        # Nodes of a local Spark use what the driver's host has.
        ({"spark.master": "local[1]", **EIGHT}, 1, CoreShare(1, None, 1)),
        ({"spark.master": "local[*]"}, 2, CoreShare(max(1, len(allowed_cpus()) // 2), None, 2)),
    ],
)
def test_the_configuration_tells_the_share(conf: dict[str, str], nodes: int, share: CoreShare) -> None:
    assert share_of(conf.get, [], nodes) == share


@pytest.mark.parametrize(
    ("conf", "there", "nodes", "share"),
    [
        (STANDALONE, [16, 12], 2, CoreShare(12, 12, 1)),
        (STANDALONE, [16, 12], 8, CoreShare(3, 12, 4)),
        (EIGHT, [8, 8], 2, CoreShare(8, 8, 1)),
        # More are promised than are there: nodes do not wait for them as long as they have slots.
        ({**EIGHT, "spark.executor.instances": "4"}, [8, 8], 4, CoreShare(4, 8, 2)),
        ({**EIGHT, "spark.executor.instances": "4"}, [8], 16, CoreShare(2, 8, 4)),
        ({**YARN, "spark.dynamicAllocation.enabled": "true"}, [1], 3, CoreShare(1, 1, 1)),
    ],
)
def test_executors_that_are_there_tell_more(
    conf: dict[str, str], there: list[int], nodes: int, share: CoreShare
) -> None:
    assert share_of(conf.get, there, nodes) == share


JOB = """
import json, sys
from dataclasses import astuple
from pyspark.sql import SparkSession
from deeprec_spark.runtime.core_share import core_share
from deeprec_spark.runtime.slots import check_slots
builder = SparkSession.builder
for key, value in json.loads(sys.argv[1]).items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()
check_slots(spark, 0, 3)
print("FOUND", json.dumps([astuple(core_share(spark, nodes)) for nodes in (1, 2, 3)]))
spark.stop()
"""


@pytest.mark.cluster
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("cores", "expected"),
    [(None, [[3, 3, 1], [1, 3, 2], [1, 3, 3]]), ("1", [[1, 1, 1], [1, 1, 1], [1, 1, 1]])],
)
def test_a_cluster_is_asked_for_its_executors(
    spark_cluster: StandaloneCluster, run_python: RunPython, cores: str | None, expected: list[list[int]]
) -> None:
    """Without spark.executor.cores there is one executor with all three cores of the worker, else three of one."""
    conf = spark_cluster.conf()
    del conf["spark.executor.instances"], conf["spark.cores.max"], conf["spark.executor.cores"]
    if cores is not None:
        conf["spark.executor.cores"] = cores
    done = run_python(JOB, json.dumps(conf), timeout=150)
    [found] = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert json.loads(found.removeprefix("FOUND ")) == expected
