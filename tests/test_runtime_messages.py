"""Messages survive the trip bit for bit, and no malformed bytes get past decode."""

import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from deeprec_spark.runtime import messages
from deeprec_spark.runtime.messages import Message, aligned_empty, decode, encode

DTYPES = ["<i8", "<i4", "<u1", "<f4", "<f8", "|b1"]

headers = st.dictionaries(
    st.text(max_size=5),
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.text(max_size=20)
    | st.lists(st.integers(), max_size=3),
    max_size=4,
)
arrays = st.dictionaries(
    st.text(min_size=1, max_size=8),
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
    ),
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(headers, arrays)
def test_round_trip(header, named):
    got = decode(encode(Message(header, named)))
    assert got.header == header
    assert list(got.arrays) == list(named)
    for name, value in named.items():
        received = got.arrays[name]
        assert received.dtype == value.dtype
        assert received.shape == value.shape
        assert received.tobytes() == value.tobytes()


def test_arrays_are_aligned_views_of_one_buffer():
    message = Message(
        {"text": "x" * 13}, {"a": np.arange(3, dtype=np.int64), "b": np.ones((5, 3), np.float32)}
    )
    buffer = encode(message)
    got = decode(buffer)
    for array in got.arrays.values():
        start = array.ctypes.data - buffer.address
        assert 0 <= start < buffer.size
        assert array.ctypes.data % 64 == 0
        assert not array.flags.writeable


def test_lists_of_arrays_are_concatenated():
    parts = [np.arange(3, dtype=np.int64), np.empty(0, np.int64), np.array([-1], np.int64)]
    assert decode(encode(Message({}, {"k": parts}))).array("k", np.int64).tolist() == [0, 1, 2, -1]


def test_strided_arrays_are_written_in_order():
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert (
        decode(encode(Message({}, {"t": matrix.T}))).array("t", np.float32, 2).tolist() == matrix.T.tolist()
    )


def test_a_misplaced_buffer_is_decoded_with_aligned_arrays():
    encoded = encode(Message({"a": 1}, {"k": np.arange(4)})).to_pybytes()
    shifted = pa.py_buffer(b"xyz" + encoded).slice(3)
    assert shifted.address % 8
    got = decode(shifted).array("k", np.int64)
    assert got.tolist() == [0, 1, 2, 3]
    assert got.ctypes.data % 8 == 0


def test_objects_do_not_travel():
    with pytest.raises(ValueError, match=r"'names' cannot be sent.*Received: dtypes=\['object'\]"):
        encode(Message({}, {"names": np.array(["a"], dtype=object)}))


def test_a_missing_or_other_array_is_named():
    message = decode(encode(Message({}, {"keys": np.zeros(3, np.int64)})))
    with pytest.raises(ValueError, match=r"no array 'rows'.*Received: arrays=\['keys'\]"):
        message.array("rows", np.float32)
    with pytest.raises(ValueError, match=r"'keys' must be float32.*Received: dtype=int64, shape=\(3,\)"):
        message.array("keys", np.float32)


def test_sizes_are_limited():
    buffer = encode(Message({}, {"a": np.zeros(1000)}))
    with pytest.raises(ValueError, match="may have 100 bytes"):
        decode(buffer, max_bytes=100)
    with pytest.raises(ValueError, match=r"may have 5000 bytes.*send less at once"):
        encode(Message({}, {"a": np.zeros(1000)}), max_bytes=5000)


def _reencoded(described: str) -> pa.Buffer:
    text = f'{{"header":{{}},"arrays":{described}}}'.encode()
    body = messages._PROLOGUE.pack(b"DRM1", len(text), 0) + text
    total = -(-len(body) // 64) * 64 + 64
    return pa.py_buffer((messages._PROLOGUE.pack(b"DRM1", len(text), total) + text).ljust(total, b"\0"))


@pytest.mark.parametrize(
    "described",
    [
        '[["a","<i8",[9],0]]',  # past the end
        '[["a","<i8",[1],64]]',
        '[["a","<i8",[1],8]]',  # not aligned
        '[["a","<i8",[-1],0]]',
        '[["a","<i8",[1],-64]]',
        '[["a","<i8",[4611686018427387904,4],0]]',  # overflow
        '[["a","|O8",[1],0]]',
        '[["a","<i8",[true],0]]',
        '[["a","<i8",1,0]]',
        '[["a"]]',
        '[{"a":1}]',
        '{"a":1}',
        "null",
        "[[[],[],[],[]]]",
    ],
)
def test_malformed_array_entries_are_rejected(described):
    with pytest.raises(ValueError, match="Not a message"):
        decode(_reencoded(described))


def test_deep_json_is_rejected():
    with pytest.raises(ValueError, match="Not a message"):
        decode(_reencoded("[" * 100_000 + "]" * 100_000))


@pytest.mark.parametrize("data", [b"", b"DRM1", b"x" * 100, b"DRM1" + b"\xff" * 60])
def test_other_bytes_are_rejected(data):
    with pytest.raises(ValueError, match="Not a message"):
        decode(pa.py_buffer(data))


def test_mutated_messages_are_read_or_rejected_never_worse():
    chance = random.Random(7)
    good = encode(
        Message({"rank": 1, "tables": ["a", "b"]}, {"k": np.arange(9), "r": np.ones((3, 3), np.float32)})
    )
    good = good.to_pybytes()
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if chance.random() < 0.3:
            data = data[: chance.randrange(len(data))]
        try:
            got = decode(pa.py_buffer(bytes(data)))
        except ValueError:
            continue
        for array in got.arrays.values():
            array.tobytes()


def test_aligned_empty_is_aligned_and_writable():
    for shape in [(0,), (1,), (7, 3), (0, 5)]:
        array = aligned_empty(shape, np.float32)
        assert array.shape == shape
        assert array.ctypes.data % 64 == 0
        array[...] = 1
