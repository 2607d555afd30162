"""Merging ranks' requests: checked against sums done by hand in float64 dictionaries."""

import tracemalloc

import numpy as np

from deeprec_spark.embedding.store import PullReply, PullRequest, PushRequest, SparseGradient, UniqueKeys
from deeprec_spark.runtime.synchronous import RankSum, merge_pulls, merge_pushes

LOW, HIGH = -(2**63), 2**63 - 1


def keys(*pairs):
    return UniqueKeys(
        np.array([key for key, _ in pairs], np.int64), np.array([count for _, count in pairs], np.int64)
    )


def push(samples, gradients, dense=None, state=None, rate=None, dim=2):
    tables = {
        table: SparseGradient(
            np.array(list(rows), np.int64), np.array(list(rows.values()), np.float32).reshape(len(rows), dim)
        )
        for table, rows in gradients.items()
    }
    return PushRequest(tables, vector(dense), vector(state), samples, sparse_learning_rate=rate)


def vector(values):
    return None if values is None else np.array(values, np.float32)


def test_pulls_are_merged_with_counts_summed_and_each_rank_gets_its_rows():
    requests = {
        1: PullRequest({"a": keys((5, 2), (LOW, 1)), "b": keys()}, dense=False),
        2: PullRequest({"a": keys((HIGH, 1), (5, 3)), "c": keys((0, 1))}, dense=True),
    }
    merged = merge_pulls(requests)
    assert merged.request.keys["a"].keys.tolist() == [5, LOW, HIGH]
    assert merged.request.keys["a"].counts.tolist() == [5, 1, 1]
    assert merged.request.keys["b"].keys.tolist() == []
    assert list(merged.request.keys) == ["a", "b", "c"]
    assert merged.request.dense
    rows = {
        "a": np.array([[50.0], [1.0], [2.0]], np.float32),
        "b": np.empty((0, 1), np.float32),
        "c": np.array([[7.0]], np.float32),
    }
    reply = PullReply(rows, np.ones(2, np.float32), np.ones(1, np.float32), step=4)
    one, two = (merged.reply_for(rank, reply, dense=requests[rank].dense) for rank in (1, 2))
    assert one.rows["a"].tolist() == [[50.0], [1.0]]
    assert one.rows["b"].shape == (0, 1)
    assert (one.dense, one.state, one.step) == (None, None, 4)
    assert two.rows["a"].tolist() == [[2.0], [50.0]]
    assert two.dense.tolist() == [1.0, 1.0]


def test_gradients_are_weighted_by_samples_and_summed():
    chance = np.random.default_rng(0)
    samples = {1: 3, 2: 5, 3: 0}
    gradients = {
        rank: {int(key): chance.normal(size=2) for key in chance.permutation(6)[:4]} for rank in samples
    }
    gradients[3] = {}
    dense = {rank: chance.normal(size=3) if samples[rank] else np.zeros(3) for rank in samples}
    merged = merge_pushes(
        {rank: push(samples[rank], {"a": gradients[rank]}, dense[rank], dense[rank]) for rank in samples}
    )
    expected = {}
    for rank in (1, 2):
        for key, value in gradients[rank].items():
            expected[key] = expected.get(key, 0) + value * samples[rank] / 8
    got = merged.gradients["a"]
    assert got.keys.tolist() == list(expected)
    np.testing.assert_allclose(got.gradient, np.array(list(expected.values())), rtol=1e-6)
    np.testing.assert_allclose(merged.dense_gradient, (3 * dense[1] + 5 * dense[2]) / 8, rtol=1e-6)
    np.testing.assert_allclose(merged.state_delta, (3 * dense[1] + 5 * dense[2]) / 8, rtol=1e-6)
    assert merged.samples == 8


def test_one_rank_with_samples_passes_unchanged():
    merged = merge_pushes({1: push(4, {"a": {7: [1.5, 2.5]}}, dense=[1.0]), 2: push(0, {"a": {}})})
    assert merged.gradients["a"].gradient.tolist() == [[1.5, 2.5]]
    assert merged.dense_gradient.tolist() == [1.0]


def test_no_samples_at_all_change_nothing():
    empty = {rank: push(0, {"a": {}}, dense=[9.0], state=[9.0]) for rank in (1, 2)}
    merged = merge_pushes(empty)
    assert len(merged.gradients["a"].keys) == 0
    assert (merged.dense_gradient, merged.state_delta, merged.samples) == (None, None, 0)


def test_the_first_learning_rate_counts():
    merged = merge_pushes({1: push(0, {}), 2: push(1, {}, rate=0.5), 3: push(1, {}, rate=0.7)})
    assert merged.sparse_learning_rate == 0.5
    assert merged.dense_learning_rate is None


def test_repeated_keys_of_a_rank_count_as_often_as_they_occur():
    repeated = SparseGradient(np.array([1, 1, 2]), np.array([[1], [2], [4]], np.float32))
    merged = merge_pushes(
        {1: push(1, {"a": {1: [8]}}, dim=1), 2: PushRequest({"a": repeated}, None, None, 1)}
    )
    assert merged.gradients["a"].keys.tolist() == [1, 2]
    assert merged.gradients["a"].gradient.tolist() == [[5.5], [2.0]]
    pulls = merge_pulls({1: PullRequest({"a": UniqueKeys(np.array([1, 1]), np.array([2, 3]))})})
    assert (pulls.request.keys["a"].keys.tolist(), pulls.request.keys["a"].counts.tolist()) == ([1], [5])
    reply = PullReply({"a": np.array([[7.0]], np.float32)}, None, None, 1)
    assert pulls.reply_for(1, reply, dense=False).rows["a"].tolist() == [[7.0], [7.0]]


def test_a_rank_with_few_keys_costs_little_however_many_the_others_have():
    rows = 2_000_000
    total = RankSum(np.zeros((rows, 1), np.float32))
    tracemalloc.start()
    try:
        total.add(np.array([3, rows - 1]), np.array([[1.0], [2.0]], np.float32))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * rows / 100  # an array as long as the highest place would be 100 times that
    assert total.total[[0, 3, rows - 1], 0].tolist() == [0.0, 1.0, 2.0]


def test_repeated_places_of_one_rank_are_seen_after_other_ranks_were_there():
    total = RankSum(np.zeros(4, np.int64))
    for places, part in (([2, 3, 1], [1, 1, 1]), ([1, 2, 1], [10, 20, 30]), ([2], [100])):
        total.add(np.array(places), np.array(part))
    assert total.total.tolist() == [0, 41, 121, 1]
