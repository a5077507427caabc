"""What all tests of the half inside a program share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def compiled_nothing_before() -> Iterator[None]:
    """Sessions refuse programs that have compiled something, so tests leave nothing compiled."""
    yield
    if "torch._dynamo" in sys.modules:
        dynamo = sys.modules["torch._dynamo"]
        dynamo.reset()
        dynamo.utils.counters.clear()
