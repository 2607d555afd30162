"""Checksums of checkpoint files."""

from __future__ import annotations

import hashlib
import re

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from deeprec_spark.embedding.checksum import PATTERN, Checksum, algorithm_of


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_pieces_have_the_checksum_of_the_whole(pieces: list[bytes]) -> None:
    new, old = Checksum(), Checksum("sha256")
    for piece in pieces:
        new.update(piece)
        old.update(memoryview(piece))
    whole = b"".join(pieces)
    assert str(new) == f"xxh3-128:{xxhash.xxh3_128(whole).hexdigest()}"
    assert str(old) == f"sha256:{hashlib.sha256(whole).hexdigest()}"
    assert all(re.fullmatch(PATTERN, str(one)) for one in (new, old))
    assert (algorithm_of(str(new)), algorithm_of(str(old))) == ("xxh3-128", "sha256")


@pytest.mark.parametrize("checksum", ["", "md5:00", "0" * 64])
def test_other_algorithms_are_refused(checksum: str) -> None:
    with pytest.raises(ValueError, match="begins with one of"):
        algorithm_of(checksum)
