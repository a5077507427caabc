"""Wrappers for tests: observers and objectives that record, and planned failures and Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from nostall.core import Checkpoint, Measurement, Objective, Space, Tags, Trial
from nostall.core.space import NO_TAGS, M, S


class PlannedInterrupt(KeyboardInterrupt):
    """Ctrl-C that a check raises; its class distinguishes it from the user's own."""


class RecordingObserver:
    """Observer that keeps all trials and checkpoints."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []
        self.checkpoints: list[Checkpoint] = []

    def on_trial(self, trial: Trial) -> None:
        self.trials.append(trial)

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.checkpoints.append(checkpoint)


class RecordingObjective(Objective[S]):
    """Objective that passes states on to ``inner`` and keeps all states and measurements.

    ``fails`` selects the states that fail. The evaluation that would exceed ``interrupt_at`` states
    raises Ctrl-C. :func:`record_evaluations` constructs it.
    """

    def __init__(
        self,
        inner: Objective[S],
        fails: Callable[[S], bool] | None,
        interrupt_at: int | None,
    ) -> None:
        self.inner = inner
        self.flops = inner.flops
        self.fails = fails
        self.interrupt_at = interrupt_at
        self.states: list[S] = []
        self.measurements: list[Measurement] = []

    def evaluate(self, states: Sequence[S]) -> list[Measurement]:
        if self.interrupt_at is not None and len(self.states) + len(states) > self.interrupt_at:
            raise PlannedInterrupt
        measurements = self.inner.evaluate(states)
        if self.fails is not None:
            measurements = [
                Measurement(self.unit, (), self.kind, failure="failed on purpose")
                if self.fails(state)
                else measurement
                for state, measurement in zip(states, measurements, strict=True)
            ]
        self.states += states
        self.measurements += measurements
        return measurements


def record_evaluations(
    inner: Objective[S],
    *,
    fails: Callable[[S], bool] | None = None,
    interrupt_at: int | None = None,
) -> RecordingObjective[S]:
    """Wrap ``inner`` in a :class:`RecordingObjective` of the same kind and unit."""

    class Recording(RecordingObjective[S]):
        kind = inner.kind
        unit = inner.unit

    return Recording(inner, fails, interrupt_at)


class InterruptedSpace(Space[S, M]):
    """Space that passes calls on to ``inner`` and raises Ctrl-C at the ``calls``-th of them.

    Draws, proposals and applications count. Attributes that a kind of space adds, such as the
    function of a schedule space, are those of ``inner``.
    """

    def __init__(self, inner: Space[S, M], calls: int) -> None:
        self.inner = inner
        self.calls = calls
        self.max_draws = inner.max_draws

    def draw(self, state: S, rng: np.random.Generator, required_tags: Tags = NO_TAGS) -> M | None:
        move = self.inner.draw(state, rng, required_tags)
        self._count()
        return move

    def propose(
        self, state: S, rng: np.random.Generator, required_tags: Tags = NO_TAGS
    ) -> M | None:
        move = self.inner.propose(state, rng, required_tags)
        self._count()
        return move

    def apply(self, state: S, move: M) -> S:
        self._count()
        return self.inner.apply(state, move)

    def start(self) -> S:
        return self.inner.start()

    def moves(self, state: S) -> Iterator[M]:
        return self.inner.moves(state)

    def key(self, state: S) -> bytes:
        return self.inner.key(state)

    def dump(self, state: S) -> str:
        return self.inner.dump(state)

    def load(self, text: str) -> S:
        return self.inner.load(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def _count(self) -> None:
        self.calls -= 1
        if self.calls <= 0:
            raise PlannedInterrupt
