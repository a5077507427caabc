"""Measured blocks of real steps: which change runs in which step, and how long it took.

A block begins with one step that is not measured, because the change before it may still act.  Both
ends of the measured part wait for the device, so that work that was only launched counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

CALM = 4
"""Steps without a new compiled graph after which a change has warmed up."""


class Step(NamedTuple):
    """One finished step of the program."""

    key: int
    """Number of the step's calls and shapes; steps with equal keys did the same work."""
    overflow: Sequence[Any]
    """What tells whether a GradScaler skipped the optimiser: flags, which can be on the device."""
    graphs: int
    """Graphs that Dynamo has compiled so far."""


class Warming:
    """Runs one arm until nothing is compiled any more."""

    def __init__(
        self,
        order: Mapping[str, Any],
        now: Callable[[], float],
        is_settled: Callable[[], bool] = lambda: True,
    ) -> None:
        """``is_settled``: whether the changes have selected what runs."""
        self.is_settled = is_settled
        self.limit = int(order["limit_steps"])
        self.until = now() + float(order["limit_seconds"])
        self.now, self.steps, self.calm, self.graphs = now, 0, 0, -1

    def border(self, step: Step) -> bool:
        """Note a step; whether the arm is warm."""
        self.steps += 1
        self.calm = self.calm + 1 if step.graphs == self.graphs else 0
        self.graphs = step.graphs
        is_warm = self.calm >= CALM or self.steps >= self.limit
        return (is_warm and self.is_settled()) or self.now() > self.until


class Schedule:
    """Runs blocks one after the other and gives each to ``emit``."""

    def __init__(
        self,
        order: Mapping[str, Any],
        *,
        apply: Callable[[Sequence[str]], None],
        sync: Callable[[], None],
        now: Callable[[], float],
        emit: Callable[..., None],
    ) -> None:
        self.arms: list[Sequence[str]] = order["arms"]
        self.blocks: list[int] = order["blocks"]
        self.steps, self.each = int(order["steps"]), bool(order["each"])
        self._apply, self._sync, self._now, self._emit = apply, sync, now, emit
        self._index, self._begin, self._last = 0, 0.0, 0.0
        self._notes: list[tuple[int, float | None, Sequence[Any]]] | None = None
        self._graphs = 0
        apply(self.arms[self.blocks[0]])

    def border(self, step: Step) -> bool:
        """Note a step; whether the last block is complete."""
        if self._notes is None:
            self._sync()
            self._notes, self._graphs = [], step.graphs
            self._begin = self._last = self._now()
            return False
        complete = len(self._notes) + 1 >= self.steps
        if self.each or complete:
            self._sync()
        seconds = None
        if self.each:
            now = self._now()
            seconds, self._last = now - self._last, now
        self._notes.append((step.key, seconds, step.overflow))
        return complete and self._close(step)

    def _close(self, step: Step) -> bool:
        seconds = self._now() - self._begin
        self._emit(
            "block",
            index=self._index,
            arm=self.blocks[self._index],
            seconds=seconds,
            # A flag on the device is read here, because reading it waits for the device.
            steps=[(key, time, any(map(bool, flags))) for key, time, flags in self._notes or ()],
            compiled=step.graphs != self._graphs,
        )
        self._index, self._notes = self._index + 1, None
        if self._index == len(self.blocks):
            return True
        self._apply(self.arms[self.blocks[self._index]])
        return False
