"""What a tuning result says of how its cubins were made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nostall.sass import Verdict
from nostall.tuning.gpu_objective import Decision


class RecipeFile(Protocol):
    """How a cubin is made again from PTX."""

    @property
    def schedule(self) -> str | None:
        """Moves of native instructions after the assembly."""

    def to_bytes(self) -> bytes: ...

    def with_ptx(self, ptx: str) -> bytes:
        """The recipe together with the PTX it starts from, as the store keeps it."""
        ...


@dataclass(frozen=True)
class DependentResult:
    """A cubin for dependent launches, compared in chains of launches back to back."""

    cubin: bytes
    recipe: RecipeFile
    verdict: Verdict
    """Verdict of the verifier of machine code."""
    mode: str
    """What was inserted: ``wait``, ``wait+trigger`` or ``trigger+wait``."""
    levers: tuple[str, ...]
    """What differs from the original, in words."""
    decision: Decision
    """Over the same chain of the original without the launch attribute."""
    over_isolated: Decision | None
    """Over the same chain of the result of the search; None if that is the original."""

    @property
    def improved(self) -> bool:
        """Whether it is faster than the original's chain, and than that of the search's result."""
        return self.decision.faster and (self.over_isolated is None or self.over_isolated.faster)
