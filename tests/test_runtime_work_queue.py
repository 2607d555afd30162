"""WorkQueue: every item once, whoever dies meanwhile."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deeprec_spark.runtime.work_queue import WorkQueue


def items(count):
    return [{"file": f"part-{index}"} for index in range(count)]


def drain(queue, owner="a"):
    order = []
    while (lease := queue.take(owner)) is not None:
        order.append(lease.item["file"])
        assert queue.complete(owner, lease.index)
    return order


def test_items_come_once_each_in_the_order_given():
    queue = WorkQueue(items(3))
    assert drain(queue) == ["part-0", "part-1", "part-2"]
    assert queue.finished


def test_an_empty_queue_is_finished():
    queue = WorkQueue([])
    assert queue.finished
    assert queue.take("a") is None


def test_leases_of_the_dead_go_to_the_next_who_asks():
    queue = WorkQueue(items(4))
    held = [queue.take("dead").index, queue.take("dead").index]
    assert queue.held("dead") == 2
    assert queue.release("dead") == 2
    assert [queue.take("alive").index for _ in range(2)] == held
    assert not queue.complete("dead", held[0]), "its work must not count any more"
    assert queue.complete("alive", held[0])
    assert queue.complete("alive", held[0]), "said again, it is true"
    assert (queue.completed, queue.leased) == (1, 1), "and counts once"


def test_an_idle_owner_takes_the_last_that_is_not_begun_of_who_holds_the_most():
    queue = WorkQueue(items(6))
    held = {owner: [queue.take(owner).index for _ in range(count)] for owner, count in (("a", 3), ("b", 2))}
    assert queue.begin("a", held["a"][0])
    last = queue.take("idle", steal=True)
    assert last.index == 5, "what nobody holds comes first"
    assert queue.take("idle") is None
    assert queue.take("idle", steal=True).index == held["b"][1], "two each: the one that was leased last"
    assert queue.take("idle", steal=True).index == held["a"][2]
    assert queue.take("other", steal=True).index == held["b"][0], "not one that was taken over: it is begun"
    assert not queue.begin("a", held["a"][2])
    assert queue.begin("idle", held["a"][2])


def test_an_item_is_begun_early_only_while_enough_is_left_for_others():
    queue = WorkQueue([{"rows": 10} for _ in range(4)])
    first, second = queue.take("a").index, queue.take("a").index
    assert queue.begin("a", first, reserve=20)
    assert queue.begin("a", second, reserve=21) is None
    assert queue.begin("a", first, reserve=21), "it is begun already"
    assert queue.take("b", steal=True) is not None
    assert queue.begin("a", second, reserve=11) is None
    assert queue.begin("a", second, reserve=10)
    third = queue.take("a").index
    assert queue.begin("a", third, reserve=1) is None
    assert queue.begin("a", third)


def test_state_goes_on_where_it_was_with_leases_taken_back():
    queue = WorkQueue(items(10))
    expected = drain(WorkQueue(items(10)))
    done = []
    for _ in range(4):
        lease = queue.take("a")
        done.append(lease.item["file"])
        queue.complete("a", lease.index)
    queue.take("a")
    restored = WorkQueue.from_dict(json.loads(json.dumps(queue.to_dict())))
    assert done + drain(restored) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "Received: version=2"),
        ({"completed": [0, 0]}, r"Received: \[0, 0\]"),
        ({"completed": [7]}, r"Received: \[7\]"),
    ],
)
def test_a_wrong_state_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        WorkQueue.from_dict({**WorkQueue(items(2)).to_dict(), **change})


def test_a_state_of_an_earlier_release_is_read():
    """Positions in checkpoints may count epochs and tell how a queue would be shuffled; no job ever had it so."""
    earlier = {"num_epochs": 1, "epoch": 0, "shuffle": False, "seed": 0}
    state = {**WorkQueue(items(2)).to_dict(), **earlier, "completed": [0]}
    assert drain(WorkQueue.from_dict(state)) == ["part-1"]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 8),
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from("tcrs")), max_size=60),
)
def test_every_item_counts_exactly_once(count, actions):
    """Whatever owners take, complete, die, or the driver restarts from a saved state."""
    queue = WorkQueue(items(count))
    held = {owner: [] for owner in range(3)}
    counted = []

    def complete(owner):
        lease = held[owner].pop()
        if queue.complete(owner, lease.index):
            counted.append(lease.index)

    for owner, action in actions:
        if action == "t" and (lease := queue.take(owner)) is not None:
            held[owner].append(lease)
        elif action == "c" and held[owner]:
            complete(owner)
        elif action == "r":
            queue.release(owner)
        elif action == "s":
            queue = WorkQueue.from_dict(queue.to_dict())
            held = {owner: [] for owner in range(3)}
    for owner in range(3):
        queue.release(owner)
    while (lease := queue.take(9)) is not None:
        held.setdefault(9, []).append(lease)
        complete(9)
    assert queue.finished
    assert sorted(counted) == list(range(count))
