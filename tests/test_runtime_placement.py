"""Every key has one server, whatever number of them, and keeps its order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from deeprec_spark.embedding.hashing import NUM_BUCKETS, bucket
from deeprec_spark.runtime.placement import server_of, split_dense, split_keys

KEYS = hnp.arrays(np.int64, st.integers(0, 30), elements=st.integers(-(2**63), 2**63 - 1))


@settings(max_examples=60, deadline=None)
@given(st.lists(KEYS, max_size=4), st.integers(1, 9))
def test_each_key_goes_to_the_server_of_its_bucket_in_order(keys, servers):
    positions = split_keys(keys, servers)
    assert len(positions) == servers
    for table, part in enumerate(keys):
        expected = [int(b) * servers // NUM_BUCKETS for b in bucket(part)]
        for server in range(servers):
            assert positions[server][table].tolist() == [i for i, one in enumerate(expected) if one == server]


@pytest.mark.parametrize("servers", [1, 2, 3, 8])
def test_keys_are_spread_evenly(servers):
    counts = np.bincount(server_of(np.arange(100_000), servers), minlength=servers)
    assert counts.min() > 0.9 * 100_000 / servers


def test_more_groups_than_sixteen_bits():
    keys = [np.array([table, -table]) for table in range(600)]
    positions = split_keys(keys, 128)
    assert sum(len(part) for server in positions for part in server) == 1200
    assert all(int(one) in (0, 1) for server in positions for part in server for one in part)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 50), st.integers(1, 8))
def test_dense_parts_are_contiguous_and_whole(size, servers):
    vector = np.arange(size, dtype=np.float32)
    parts = split_dense(vector, servers)
    assert len(parts) == servers
    assert np.concatenate(parts).tolist() == vector.tolist()
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
