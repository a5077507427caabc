"""The order of the passes of a stage of a hybrid plan."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="hybrids need the extra nostall[torch]")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from nostall.parallel.sharding.hybrid.messages import one_forward_one_backward  # noqa: E402


def test_the_first_stage_runs_ahead_and_the_last_alternates() -> None:
    first, last = (one_forward_one_backward(stage, 2, 3) for stage in (0, 1))
    f, b = "forward", "backward"
    assert first == [(f, 0), (f, 1), (b, 0), (f, 2), (b, 1), (b, 2)]
    assert last == [(f, 0), (b, 0), (f, 1), (b, 1), (f, 2), (b, 2)]


@given(st.integers(1, 6).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n))),
       st.integers(1, 9))  # fmt: skip
def test_each_pass_runs_once_and_few_micro_batches_are_in_flight(
    place: tuple[int, int], count: int
) -> None:
    stage, stages = place
    passes = one_forward_one_backward(stage, stages, count)
    for direction in ("forward", "backward"):
        assert [n for kind, n in passes if kind == direction] == list(range(count))
    in_flight = most = 0
    for direction, _ in passes:
        in_flight += 1 if direction == "forward" else -1
        assert in_flight >= 0
        most = max(most, in_flight)
    assert most == min(stages - stage, count)


@given(st.integers(1, 5), st.integers(1, 7))
def test_the_orders_of_all_stages_end(stages: int, count: int) -> None:
    """Sends do not wait; a pass waits for the same pass of a neighbour."""
    left = [one_forward_one_backward(stage, stages, count) for stage in range(stages)]
    done: set[tuple[int, str, int]] = set()

    def is_ready(stage: int, direction: str, number: int) -> bool:
        needed = stage - 1 if direction == "forward" else stage + 1
        return not 0 <= needed < stages or (needed, direction, number) in done

    while any(left):
        ready = [s for s in range(stages) if left[s] and is_ready(s, *left[s][0])]
        assert ready, left
        for stage in ready:
            done.add((stage, *left[stage].pop(0)))
