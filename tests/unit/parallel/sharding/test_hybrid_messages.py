"""The order of the passes of a stage of a hybrid plan."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="hybrids need the extra nostall[torch]")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from nostall.parallel.sharding.hybrid import messages  # noqa: E402
from nostall.parallel.sharding.hybrid.messages import (  # noqa: E402
    StageProcesses,
    one_forward_one_backward,
)
from nostall.parallel.sharding.program.sends import Sends  # noqa: E402


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


class _Send:
    """A send with a settable end."""

    def __init__(self) -> None:
        self.is_done = False
        self.error = ""

    def is_completed(self) -> bool:
        return self.is_done

    def wait(self) -> None:
        if self.error:
            raise RuntimeError(self.error)


@pytest.fixture
def first_stage(monkeypatch: pytest.MonkeyPatch) -> tuple[StageProcesses, list[_Send]]:
    """The first of two stages, and its sends, which a test completes."""
    sends: list[_Send] = []

    def broadcast(*_: Any, **__: Any) -> _Send:
        sends.append(_Send())
        return sends[-1]

    processes = object.__new__(StageProcesses)
    vars(processes).update(number=0, firsts=[0, 1, 2], _to_next=["group"], _to_previous=["group"])
    processes._sends = Sends()
    monkeypatch.setattr(messages.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(messages.dist, "broadcast", broadcast)
    return processes, sends


def test_sent_tensors_are_kept_until_their_sends_complete(
    first_stage: tuple[StageProcesses, list[_Send]],
) -> None:
    processes, sends = first_stage

    def send() -> Callable[[], Any]:
        tensor = torch.ones(3)
        processes.send("forward", [tensor])
        return weakref.ref(tensor)

    first, second = send(), send()
    assert first() is not None
    assert second() is not None
    sends[0].is_done = True
    send()
    assert first() is None  # so the memory does not grow with the micro-batches
    assert second() is not None


def test_a_failed_send_is_not_dropped_silently(
    first_stage: tuple[StageProcesses, list[_Send]],
) -> None:
    processes, sends = first_stage
    processes.send("forward", [torch.ones(3)])
    sends[0].is_done, sends[0].error = True, "connection closed by peer"
    with pytest.raises(RuntimeError, match="closed by peer"):
        processes.send("forward", [torch.ones(3)])
