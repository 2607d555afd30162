"""Options of a job's runtime."""

from __future__ import annotations

import pytest

from deeprec_spark.cluster import ClusterOptions
from deeprec_spark.config_sections import DeadlinesSection
from deeprec_spark.data.file_cache import CacheOptions
from deeprec_spark.runtime.coordinator import Coordinator
from deeprec_spark.runtime.launch import LaunchOptions
from deeprec_spark.runtime.options import CoordinatorOptions, DeadlineOptions


def test_the_defaults_of_users_are_those_of_the_coordinator() -> None:
    defaults = CoordinatorOptions(1, 1, token="t")
    for name, value in DeadlineOptions().coordinator_options().items():
        assert getattr(defaults, name) == value


@pytest.mark.parametrize("heartbeat_secs", [0.5, 8.0, 3600.0])
def test_nodes_report_several_times_before_they_are_lost(heartbeat_secs: float) -> None:
    arguments = ClusterOptions(deadlines=DeadlineOptions(heartbeat_secs=heartbeat_secs))
    options = CoordinatorOptions(1, 1, token="t", **arguments.deadlines.coordinator_options())
    assert options.heartbeat_timeout == heartbeat_secs
    assert 0 < options.heartbeat_interval <= heartbeat_secs / 4


@pytest.mark.parametrize(
    "name", ["registration_secs", "heartbeat_secs", "rejoin_secs", "stall_secs", "step_secs", "file_secs"]
)
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_no_wait_is_without_an_end(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"Received: {name}={value}"):
        DeadlineOptions(**{name: value})


def test_what_a_job_says_of_a_step_reaches_its_nodes() -> None:
    deadlines = DeadlinesSection(step_secs=1234.5).make_options()
    coordinator = Coordinator(CoordinatorOptions(1, 2, "sync", **deadlines.coordinator_options()))
    try:
        settings = LaunchOptions.of(coordinator, "package.module:entry").settings()
    finally:
        coordinator.stop(timeout=5.0)
    assert settings.sync_timeout == 1234.5


def test_a_step_waits_longer_than_a_worker_for_a_file_that_another_one_fetches() -> None:
    assert DeadlineOptions().step_secs > CacheOptions("cache").wait_seconds
