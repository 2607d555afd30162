"""Contests among contestants that train nothing: settings, rounds, and those that fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.contest import Contest, ContestOptions
from benchmarks.contestants import Peer

pytestmark = pytest.mark.timeout(120)
SHORT = ContestOptions(seconds=0.02, warmup=0.01, trial=0.02, rounds=2)
SLOW, FAST = {"seconds": 0.02}, {"seconds": 0.001}


def peer(name: str, *settings: dict[str, float], pause: bool = True) -> Peer:
    return Peer(name, "tests.benchmark_peer", settings, pause=pause)


def contest(tmp_path: Path, options: ContestOptions = SHORT) -> Contest:
    return Contest(tmp_path / "no-data", 10, options)


@pytest.mark.parametrize("fresh", [False, True])
def test_the_fastest_settings_play_all_rounds(tmp_path: Path, fresh: bool) -> None:
    options = ContestOptions(**{**vars(SHORT), "fresh": fresh})
    one, two = contest(tmp_path, options).run([peer("one", SLOW, FAST, SLOW), peer("two", SLOW, pause=False)])
    assert one.settings == FAST
    assert [settings for settings, _ in one.trials] == [SLOW, FAST, SLOW]
    assert (len(one.rates), len(two.rates)) == (2, 2)
    assert one.version == "none"
    assert 0 < two.median <= 10 / 0.02


def test_settings_are_taken_untried_where_no_time_is_given(tmp_path: Path) -> None:
    [one] = contest(tmp_path, ContestOptions(**{**vars(SHORT), "trial": 0.0})).run([peer("one", FAST, SLOW)])
    assert one.settings == SLOW
    assert one.trials == []


def test_who_fails_is_told_and_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    never = Peer("never", "tests.no_such_module", (SLOW, FAST))
    # Two answers for the first rate, one for the warm-up, one for the first round.
    later = peer("later", {**FAST, "dies_after": 4})
    [left] = contest(tmp_path).run([never, later, peer("good", FAST)])
    assert left.peer.name == "good"
    out = capsys.readouterr().out
    assert "never fails" in out
    assert "later fails" in out
    assert "had enough" in out


def test_a_contest_that_nobody_can_take_part_in_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="No setting of peer never runs"):
        contest(tmp_path).run([Peer("never", "tests.no_such_module", (SLOW, FAST))])
