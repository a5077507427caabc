"""Interface of objectives: functions that assign a cost to each state of a search space."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Generic, TypeVar

from nostall.core.measurement import Kind, Measurement

S_contra = TypeVar("S_contra", contravariant=True)


class Objective(ABC, Generic[S_contra]):
    """Maps states to measurements of one unit; lower is better."""

    kind: ClassVar[Kind]
    unit: ClassVar[str]
    flops: float | None = None
    """Floating-point operations of one evaluation, if known.  Strategies that accept moves by
    throughput (SIP) need it."""

    @abstractmethod
    def evaluate(self, states: Sequence[S_contra]) -> list[Measurement]:
        """One measurement per state, in order.

        A state that cannot be evaluated gets a measurement with ``failure``, not an exception.
        """

    def measure(self, state: S_contra, upcoming: Iterator[S_contra]) -> Measurement:
        """Measure one state.

        ``upcoming`` yields states that may be measured next.  An objective that waits for a device
        may take states from it and prepare them meanwhile; this default takes none.
        """
        return self.evaluate([state])[0]
