"""Pipelines: objectives that work on several proposals at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, runtime_checkable

from nostall.core import ContractBroken, Measurement, Space
from nostall.core.search import T
from nostall.core.space import M, S
from nostall.search.loop import Task
from nostall.search.orders.operators import Proposal


@dataclass(frozen=True, slots=True)
class Finished(Generic[T]):
    """A proposal that left the pipeline."""

    number: int
    """As submitted."""
    state: T
    measurement: Measurement | None
    """None if the state was dropped without a measurement."""
    dropped: str = ""
    """Why the state was dropped, such as ``duplicate``."""


@runtime_checkable
class Pipeline(Protocol[S]):
    """An objective that prepares many proposals while it measures one.

    A state that is submitted again is measured again.
    """

    @property
    def capacity(self) -> int:
        """Proposals that should be in the pipeline to keep it busy."""
        ...

    @property
    def idle(self) -> bool:
        """Whether the device would wait, because no proposal is ready to be measured."""
        ...

    def submit(self, number: int, proposal: Proposal[S]) -> None:
        """Add a proposal; returns at once."""
        ...

    def collect(self) -> Finished[S]:
        """Wait for the next proposal that is done, in any order."""
        ...

    def discard(self) -> None:
        """Drop all proposals in the pipeline; called when the search ends."""
        ...


class Sequential(Generic[S, M]):
    """A pipeline of one proposal, for objectives that measure one state at a time."""

    capacity = 1
    idle = False

    def __init__(self, task: Task[S, M]) -> None:
        self._task = task
        self._waiting: tuple[int, Proposal[S]] | None = None

    def submit(self, number: int, proposal: Proposal[S]) -> None:
        """As :meth:`Pipeline.submit`."""
        if self._waiting is not None:
            raise ContractBroken("a sequential pipeline holds one proposal; collect it first")
        self._waiting = number, proposal

    def collect(self) -> Finished[S]:
        """As :meth:`Pipeline.collect`; drops a state that equals its parent."""
        if self._waiting is None:
            raise ContractBroken("the pipeline is empty; submit a proposal first")
        (number, proposal), self._waiting = self._waiting, None
        space: Space[S, M] = self._task.space
        state = proposal.realize(space)
        is_given = proposal.operator.kind == "given"
        if not is_given and space.key(state) == space.key(proposal.parent):
            return Finished(number, state, None, "no change")
        return Finished(number, state, self._task.measure(state))

    def discard(self) -> None:
        """As :meth:`Pipeline.discard`."""
        self._waiting = None
