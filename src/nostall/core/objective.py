"""What a state costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Generic, TypeVar

from nostall.core.measurement import Kind, Measurement

S_contra = TypeVar("S_contra", contravariant=True)


class Objective(ABC, Generic[S_contra]):
    """Maps states to measurements of one unit; lower is better.

    ``flops`` is the work of one evaluation when it is known: strategies that accept by
    throughput (SIP) need it.
    """

    kind: ClassVar[Kind]
    unit: ClassVar[str]
    flops: float | None = None

    @abstractmethod
    def evaluate(self, states: Sequence[S_contra]) -> list[Measurement]:
        """One measurement per state, in order; a state that fails gets ``failure``, no raise."""

    def measure(self, state: S_contra, ahead: Iterator[S_contra]) -> Measurement:
        """One state.  ``ahead`` gives states that may be asked for next: an objective that waits
        for a device may take them meanwhile and prepare them; others leave them alone."""
        return self.evaluate([state])[0]
