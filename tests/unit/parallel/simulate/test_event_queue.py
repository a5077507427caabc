"""The simulator's queue of events: a heap in two arrays, ordered by time and then by number."""

from __future__ import annotations

import numpy as np
import pytest

from nostall.parallel.simulate.engine import _pop, _push


@pytest.mark.parametrize("times_differ", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_events_leave_the_queue_in_order(seed: int, times_differ: bool) -> None:
    """Some events leave between the insertions of others; equal times leave by number."""
    rng = np.random.default_rng(seed)
    times, numbers = np.zeros(120), np.zeros(120, np.int64)
    size, waiting = 0, list[tuple[int, int]]()

    def take_first() -> int:
        assert (times[0], numbers[0]) == min(waiting)
        waiting.remove(min(waiting))
        return int(_pop(times, numbers, size))

    for _ in range(120):
        event = int(rng.integers(1000 if times_differ else 3)), int(rng.integers(-1, 20))
        size = int(_push(times, numbers, size, float(event[0]), event[1]))
        waiting.append(event)
        if rng.random() < 0.4:
            size = take_first()
    while size:
        size = take_first()
    assert waiting == []
