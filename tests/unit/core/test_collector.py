"""The collector is off inside until somebody ends that, and afterwards as it was."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from nostall.core.collector import paused, resume, settled


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    gc.collect()  # no round is due while a test looks
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


class Thing:
    """Something that the collector keeps a list of."""


def young(thing: Thing) -> bool:
    return any(one is thing for one in gc.get_objects(0) + gc.get_objects(1))


def old(thing: Thing) -> bool:
    return any(one is thing for one in gc.get_objects(2))


def test_what_is_settled_is_old_without_a_round_and_may_go_all_the_same() -> None:
    rounds: list[int] = []
    gc.callbacks.append(lambda phase, about: rounds.append(about["generation"]))
    try:
        with settled():
            thing = Thing()
            assert young(thing) and not gc.isenabled()
        assert 2 not in rounds
    finally:
        gc.callbacks.pop()
    assert old(thing) and gc.isenabled() and gc.get_freeze_count() == 0
    thing.itself = thing  # type: ignore[attr-defined]
    left = weakref.ref(thing)
    del thing
    gc.collect()
    assert left() is None


def test_garbage_of_before_goes_before_anything_is_settled() -> None:
    thing = Thing()
    thing.itself = thing  # type: ignore[attr-defined]
    left = weakref.ref(thing)
    del thing
    with settled():
        assert left() is None


def test_nothing_is_settled_behind_an_early_end_or_beside_what_a_program_keeps_apart() -> None:
    with settled():
        thing = Thing()
        resume()
    assert young(thing)
    gc.freeze()
    try:
        apart = gc.get_freeze_count()
        with settled():
            thing = Thing()
        assert young(thing) and gc.get_freeze_count() > 0.9 * apart
    finally:
        gc.unfreeze()


def test_where_the_collector_is_off_nothing_is_settled() -> None:
    gc.disable()
    with settled():
        thing = Thing()
    assert young(thing) and not gc.isenabled()
