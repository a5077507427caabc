"""The simulator's queue of events: a heap in two arrays, ordered by time and then by number."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nostall.parallel.simulate.engine import _pop, _push

EVENTS = st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 20)), min_size=1, max_size=40)


@given(EVENTS, st.lists(st.booleans(), max_size=40))
@settings(max_examples=200, deadline=None)
def test_events_leave_the_queue_in_order(events: list[tuple[int, int]], pops: list[bool]) -> None:
    """Some events leave between the insertions of others; equal times leave by number."""
    times, numbers = np.zeros(len(events)), np.zeros(len(events), np.int64)
    size, waiting = 0, list[tuple[int, int]]()

    def take_first() -> int:
        assert (times[0], numbers[0]) == min(waiting)
        waiting.remove(min(waiting))
        return int(_pop(times, numbers, size))

    for position, (time, number) in enumerate(events):
        size = int(_push(times, numbers, size, float(time), number))
        waiting.append((time, number))
        if position < len(pops) and pops[position]:
            size = take_first()
    while size:
        size = take_first()
    assert waiting == []
