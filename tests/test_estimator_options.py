"""How many nodes an Estimator asks for, and what it refuses before anything starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deeprec_spark.estimator_options import EstimatorOptions
from deeprec_spark.runtime.semi_sync import SemiSyncOptions


def session(executors: int) -> Any:
    """A session whose configuration asks for so many executors."""
    return SimpleNamespace(conf=SimpleNamespace(get=lambda name, default: str(executors)))


@pytest.mark.parametrize(
    ("options", "num_ps", "num_workers"),
    [
        ({}, 0, 1),
        ({"num_ps": 1}, 1, 3),
        ({"placement": "colocated"}, 0, 4),
        ({"placement": "colocated", "workers_per_node": 2}, 0, 8),
        ({"placement": "colocated", "num_workers": 3}, 0, 3),
    ],
)
def test_nodes_follow_from_the_executors(options: dict[str, Any], num_ps: int, num_workers: int) -> None:
    cluster = EstimatorOptions(**options).cluster(session(4))
    assert (cluster.num_ps, cluster.num_workers) == (num_ps, num_workers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": 2}, "num_ps >= 1, or placement='colocated'. Received: num_ps=0, num_workers=2"),
        ({"placement": "colocated", "num_ps": 1}, "set num_ps=0. Received: .*num_ps=1"),
        ({"placement": "beside"}, "placement='beside'"),
        (
            {"num_ps": 1, "semi_sync": SemiSyncOptions(backup_workers=1)},
            "set mode='sync'.*Received: mode='async'",
        ),
        (
            {"num_ps": 1, "num_workers": 1, "mode": "sync", "semi_sync": SemiSyncOptions(backup_workers=1)},
            "backup_workers=1, num_workers=1",
        ),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EstimatorOptions(**options).cluster(session(4))
