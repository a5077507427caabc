"""Pausing the garbage collector: state inside, after an error, and after an early end."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from nostall.core.garbage_collector import paused, paused_then_promoted, resume


@pytest.fixture(autouse=True)
def enabled_collector() -> Iterator[None]:
    gc.unfreeze()  # tests/conftest.py freezes what has been imported
    gc.collect(1)
    threshold = gc.get_threshold()
    gc.set_threshold(0)  # so that no automatic collection is due during a test
    yield
    gc.set_threshold(*threshold)
    gc.enable()
    gc.freeze()


def test_paused_disables_the_collector_and_restores_it_after_an_error() -> None:
    with pytest.raises(ValueError), paused():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()


def test_a_disabled_collector_stays_disabled() -> None:
    gc.disable()
    with paused(), paused():
        pass
    assert not gc.isenabled()


def test_resume_ends_only_a_pause_of_the_same_thread() -> None:
    with paused():
        thread = threading.Thread(target=resume)
        thread.start()
        thread.join()
        assert not gc.isenabled()
        resume()
        assert gc.isenabled()
    gc.disable()
    resume()
    with paused():
        resume()
        assert not gc.isenabled(), "the user's process disabled it"
    assert not gc.isenabled()


class Tracked:
    """An object that the garbage collector tracks."""


def is_young(item: Tracked) -> bool:
    return any(tracked is item for tracked in gc.get_objects(0) + gc.get_objects(1))


def is_old(item: Tracked) -> bool:
    return any(tracked is item for tracked in gc.get_objects(2))


def test_promoted_objects_are_old_without_a_full_collection_and_can_be_freed() -> None:
    generations: list[int] = []
    gc.callbacks.append(lambda phase, info: generations.append(info["generation"]))
    try:
        with paused_then_promoted():
            item = Tracked()
            assert is_young(item) and not gc.isenabled()
        assert 2 not in generations
    finally:
        gc.callbacks.pop()
    assert is_old(item) and gc.isenabled() and gc.get_freeze_count() == 0
    item.itself = item  # type: ignore[attr-defined]
    reference = weakref.ref(item)
    del item
    gc.collect()
    assert reference() is None


def test_young_garbage_is_freed_before_objects_are_promoted() -> None:
    item = Tracked()
    item.itself = item  # type: ignore[attr-defined]
    reference = weakref.ref(item)
    del item
    with paused_then_promoted():
        assert reference() is None


def test_nothing_is_promoted_after_an_early_end_or_if_the_process_has_frozen_objects() -> None:
    with paused_then_promoted():
        item = Tracked()
        resume()
    assert is_young(item)
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with paused_then_promoted():
            item = Tracked()
        assert is_young(item) and gc.get_freeze_count() > 0.9 * frozen
    finally:
        gc.unfreeze()


def test_a_disabled_collector_promotes_nothing() -> None:
    gc.disable()
    with paused_then_promoted():
        item = Tracked()
    assert is_young(item) and not gc.isenabled()
