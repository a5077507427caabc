"""Fixtures of the tests of distance experiments."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def template() -> bytes:
    """The template's cubin, as ``benchmarks.sass.distances.archive --template`` wrote it."""
    return gzip.decompress(Path(__file__).with_name("template.cubin.gz").read_bytes())
