"""What every proximal policy optimisation has to be told, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nostall.core import BadInput
from nostall.sass.game.environment import HORIZON


@dataclass(frozen=True, kw_only=True)
class PpoParameters:
    """The defaults are CuAsmRL's (branch ``reproduce``).

    A rollout is ``steps`` turns, an episode at most ``horizon``; after a rollout come ``epochs``
    passes in minibatches of ``minibatch`` turns at a learning ``rate``.  ``discount`` and
    ``smoothing`` are gamma and lambda of the advantages; ``entropy`` and ``value`` weigh those
    parts of the loss; ``gradient`` is its gradient's largest norm.

    Raises :class:`BadInput` for numbers that make no sense.
    """

    allowed: ClassVar[str] = "counts of at least 1, a minibatch of at least 2, numbers above 0"

    steps: int = 64
    horizon: int = HORIZON
    epochs: int = 4
    minibatch: int = 8
    rate: float = 2.5e-4
    discount: float = 0.99
    smoothing: float = 0.95
    clip: float = 0.2
    entropy: float = 0.01
    value: float = 0.5
    gradient: float = 0.5

    def __post_init__(self) -> None:
        if not self.sensible:
            raise BadInput(
                f"{type(self).__name__.lower()} got {self}; allowed are {self.allowed}; leave out "
                "what you do not mean to change"
            )

    @property
    def sensible(self) -> bool:
        """Whether the numbers are allowed; a subclass adds its own."""
        counts = (self.steps, self.horizon, self.epochs)
        parts = (self.rate, self.discount, self.smoothing, self.clip, self.gradient)
        weights = (self.entropy, self.value)
        return min(counts) > 0 and self.minibatch > 1 and min(parts) > 0 and min(weights) >= 0
