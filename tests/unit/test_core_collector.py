"""The collector is off inside until somebody ends that, and afterwards as it was."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from nostall.core.collector import paused, resume


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


def test_a_pause_ends_early_and_only_a_pause_of_this_thread() -> None:
    with paused():
        other = threading.Thread(target=resume)
        other.start()
        other.join()
        assert not gc.isenabled()
        resume()
        assert gc.isenabled()
    gc.disable()
    resume()
    with paused():
        resume()
        assert not gc.isenabled(), "the program has it off"
    assert not gc.isenabled()
