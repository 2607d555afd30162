"""A rank has one living node at most, and every silence ends."""

import threading

import pytest

from deeprec_spark.runtime.errors import StaleNodeError
from deeprec_spark.runtime.membership import Membership, MemberState
from deeprec_spark.runtime.options import CoordinatorOptions

OPTIONS = CoordinatorOptions(
    num_ps=1, num_workers=2, heartbeat_interval=1, heartbeat_timeout=10, start_timeout=60
)


class Clock:
    """A clock that tests move."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def lost():
    return []


@pytest.fixture
def members(clock, lost):
    condition = threading.Condition(threading.RLock())
    return Membership(OPTIONS, condition, lost.append, condition.notify_all, clock)


def claim(members, rank=1, attempt="first", timeout=0.0, stopping=False):
    return members.claim(rank, attempt, "host-a", timeout=timeout, stopping=lambda: stopping)


def test_a_claimed_rank_becomes_running_by_its_announcement(members):
    member = claim(members, rank=0)
    assert member.state is MemberState.CLAIMED
    assert not members.all_running([0])
    members.announce(0, member.incarnation, "host-a:1")
    assert members.all_running([0])
    assert members.get(0).address == "host-a:1"


def test_a_copy_of_a_living_rank_stands_by(members, clock):
    first = claim(members)
    members.announce(1, first.incarnation, None)
    assert claim(members, attempt="copy") is None
    clock.now = 9
    members.beat(1, first.incarnation)
    clock.now = 18
    assert claim(members, attempt="copy") is None
    members.current(1, first.incarnation)


def test_a_copy_takes_over_from_a_silent_rank_which_is_then_turned_away(members, clock, lost):
    first = claim(members)
    members.announce(1, first.incarnation, None)
    clock.now = 10
    second = claim(members, attempt="copy")
    assert [member.rank for member in lost] == [1]
    assert second.incarnation > first.incarnation
    for call in (members.beat, lambda *who: members.announce(*who, None), members.current):
        with pytest.raises(
            StaleNodeError, match=rf"worker 0 \(rank 1\).*Received: incarnation={first.incarnation}"
        ):
            call(1, first.incarnation)
    assert not members.exited(1, first.incarnation, failed=True), "its end says nothing about the second"
    assert members.is_alive(1)


def test_a_waiting_copy_takes_over_as_soon_as_the_first_one_dies(members):
    first = claim(members)
    taken = []
    waiter = threading.Thread(target=lambda: taken.append(claim(members, attempt="copy", timeout=30)))
    waiter.start()
    assert members.exited(1, first.incarnation, failed=True, reason="was killed")
    waiter.join(10)
    assert taken[0].attempt == "copy"


def test_the_same_attempt_may_ask_again(members):
    assert claim(members) is claim(members)


def test_no_copy_starts_when_the_rank_ended_well_or_the_job_is_over(members):
    first = claim(members)
    members.exited(1, first.incarnation, failed=False)
    assert claim(members, attempt="copy") is None
    assert claim(members, rank=2, stopping=True) is None


def test_a_process_that_never_starts_is_lost_after_the_start_deadline(members, clock, lost):
    claim(members)
    clock.now = 59
    members.expire()
    assert not lost
    clock.now = 60
    members.expire()
    assert lost[0].reason == "not started after 60.0 s"


def test_who_is_missing_and_since_when(members, clock):
    clock.now = 5
    first = claim(members, rank=0)
    members.announce(0, first.incarnation, "host-a:1")
    claim(members, rank=1)
    clock.now = 8
    assert members.describe_missing(range(3)) == (
        "worker 0 (rank 1) on host-a: claimed since 3.0 s; worker 1 (rank 2): never seen in 8.0 s"
    )


def test_ranks_are_checked(members):
    with pytest.raises(ValueError, match=r"0 to 2. Received: rank=3"):
        claim(members, rank=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_ps": 0, "num_workers": 2}, "num_ps=0, num_workers=2"),
        ({"num_ps": 1, "num_workers": 0}, "num_workers=0"),
        ({"num_ps": 1, "num_workers": 1, "mode": "other"}, "mode='other'"),
        ({"num_ps": 1, "num_workers": 1, "placement": "other"}, "placement='other'"),
        ({"num_ps": 1, "num_workers": 2, "placement": "colocated"}, "set num_ps=0. .*num_ps=1"),
        (
            {"num_ps": 1, "num_workers": 1, "heartbeat_interval": 9, "heartbeat_timeout": 10},
            "heartbeat_interval=9",
        ),
    ],
)
def test_options_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        CoordinatorOptions(**arguments)


@pytest.mark.parametrize(
    ("num_ps", "num_workers", "placement", "serving", "holding"),
    [
        (2, 3, "separate", [0, 1], [0, 1]),
        (0, 1, "separate", [], [0]),
        (0, 3, "colocated", [0, 1, 2], [0, 1, 2]),
        (0, 1, "colocated", [], [0]),
    ],
)
def test_who_serves_and_who_holds_tables(num_ps, num_workers, placement, serving, holding):
    options = CoordinatorOptions(num_ps, num_workers, placement=placement)
    assert (list(options.server_ranks), list(options.table_ranks)) == (serving, holding)


def test_the_token_is_in_no_description():
    options = CoordinatorOptions(1, 1)
    assert options.token not in repr(options)
    assert options.token != CoordinatorOptions(1, 1).token
