"""Hyperparameters that all PPO strategies share, with their validation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nostall.core import BadInput
from nostall.papers.game.environment import HORIZON


@dataclass(frozen=True, kw_only=True)
class PpoParameters:
    """Hyperparameters of PPO; the defaults are those of CuAsmRL (branch ``reproduce``).

    Raises :class:`BadInput` for values out of range.
    """

    strategy: ClassVar[str] = "ppo"
    """Name of the strategy in messages."""
    allowed: ClassVar[str] = "counts of at least 1, a minibatch of at least 2, numbers above 0"
    """The allowed values in words."""

    steps: int = 64
    """Steps per rollout."""
    horizon: int = HORIZON
    """Most steps per episode."""
    epochs: int = 4
    """Passes over a rollout after it is collected."""
    minibatch: int = 8
    """Steps per minibatch."""
    rate: float = 2.5e-4
    """Learning rate."""
    discount: float = 0.99
    """Discount factor gamma of the returns."""
    smoothing: float = 0.95
    """Lambda of the generalised advantage estimates."""
    clip: float = 0.2
    """Clip range of the probability ratio."""
    entropy: float = 0.01
    """Weight of the entropy in the loss."""
    value: float = 0.5
    """Weight of the value loss."""
    gradient: float = 0.5
    """Largest norm of the gradient."""

    def __post_init__(self) -> None:
        if not self.is_valid:
            raise BadInput(
                f"{self.strategy} got {self}; allowed are {self.allowed}; leave out the values "
                "that you do not want to change"
            )

    @property
    def is_valid(self) -> bool:
        """Whether all values are in range; subclasses add their own conditions."""
        counts = (self.steps, self.horizon, self.epochs)
        parts = (self.rate, self.discount, self.smoothing, self.clip, self.gradient)
        weights = (self.entropy, self.value)
        return min(counts) > 0 and self.minibatch > 1 and min(parts) > 0 and min(weights) >= 0
