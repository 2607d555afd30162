"""Log lines of nodes in the driver's log."""

import logging

import pytest

from deeprec_spark.runtime.node_log import log_node_lines


def test_levels_and_names(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="deeprec_spark.node"):
        log_node_lines(
            1,
            1,
            [
                "WARNING my.module: careful",
                "a print",
                "I0000 00:00:1796012434.735870   24129 port.cc:153] oneDNN custom operations are on.",
                "E0000 00:00:1796012434.735870   24129 some.cc:1] broken",
            ],
        )
        log_node_lines(0, 1, ["ERROR my.module: lost"])
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert found == [
        ("WARNING", "[worker 0] my.module: careful"),
        ("INFO", "[worker 0] a print"),
        (
            "DEBUG",
            "[worker 0] I0000 00:00:1796012434.735870   24129 port.cc:153] oneDNN custom operations are on.",
        ),
        ("INFO", "[worker 0] E0000 00:00:1796012434.735870   24129 some.cc:1] broken"),
        ("ERROR", "[server 0] my.module: lost"),
    ]
    assert [record.__dict__["rank"] for record in caplog.records] == [1, 1, 1, 1, 0]
