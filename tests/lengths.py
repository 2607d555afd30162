"""Which tests are too long for every change: `make test-all` runs them."""

from __future__ import annotations

import os

import pytest

ALL = pytest.mark.skipif("DEEPREC_TEST_ALL" not in os.environ, reason="takes minutes: run by make test-all")
