"""The collector is off inside, and afterwards as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from nostall.core.collector import paused


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.enable()


def test_it_is_off_inside_and_on_again_after_an_error() -> None:
    with pytest.raises(ValueError), paused():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()


def test_where_it_was_off_it_stays_off() -> None:
    gc.disable()
    with paused(), paused():
        pass
    assert not gc.isenabled()
