"""Random sizes of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch

Step = Callable[[], torch.Tensor]
"""Runs a forward pass and returns its loss."""
Builder = Callable[[np.random.Generator], Step]
"""Makes a model of random size, on the device of the context."""


def multiple(rng: np.random.Generator, low: int, high: int, of: int = 1) -> int:
    """A log-uniform multiple of ``of`` from ``low`` to ``high``."""
    value = np.exp(rng.uniform(np.log(low), np.log(high + 1)))
    return max(low, int(value) // of * of)


T = TypeVar("T")


def one_of(rng: np.random.Generator, *choices: T) -> T:
    return choices[int(rng.integers(len(choices)))]
