"""A model's profile: its layers in one topological order and the tensors that pass between them.

A cut at position ``p`` separates the first ``p`` layers from the others.  A prefix of a topological
order contains all predecessors of its layers, so every such cut is convex, whatever the graph.
Cuts that are not prefixes of this order are not considered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict

from nostall.parallel.errors import BadProfile

Floats = NDArray[np.float64]
MAX_NUMBER = 1e18
"""Largest time in seconds and size in bytes: sums over layers and micro-batches stay finite."""

_STORED = ConfigDict(extra="forbid", revalidate_instances="always")
"""Of values in files: no other fields, and numbers of the fields' types."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a profile, at the profile's batch size; times in seconds, sizes in bytes.

    Raises :class:`BadProfile` if a number is not between 0 and 1e18, or if ``weight_gradient_s``
    is larger than ``backward_s``.
    """

    name: str
    forward_s: float
    backward_s: float
    """The whole backward pass: gradients of the inputs and of the parameters."""
    parameter_bytes: float = 0.0
    stored_bytes: float | None = None
    """Measured bytes that the layer keeps from its forward to its backward pass; None if they were
    not measured, which makes every memory figure a lower bound."""
    weight_gradient_s: float | None = None
    """The part of ``backward_s`` that computes gradients of parameters (W in zero-bubble
    schedules); None if unknown."""

    __pydantic_config__ = _STORED

    def __post_init__(self) -> None:
        for field in ("forward_s", "backward_s", "parameter_bytes", "stored_bytes"):
            _check_number(self.name, field, getattr(self, field))
        _check_number(self.name, "weight_gradient_s", self.weight_gradient_s)
        if self.weight_gradient_s is not None and self.weight_gradient_s > self.backward_s:
            raise BadProfile(
                f"layer {self.name!r} has weight_gradient_s={self.weight_gradient_s}, more than "
                f"its backward_s={self.backward_s}; allowed is a part of backward_s; profile the "
                "layer again"
            )


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that one layer produces for later layers.

    Stages send tensors only to the next stage, so the tensor is charged at every cut between its
    producer and its last consumer.
    """

    producer: int
    """Number of the layer that produces the tensor."""
    last_consumer: int
    """Number of the last layer that reads it."""
    bytes: float
    """Size at the profile's batch size."""
    gradient: bool = True
    """Whether a gradient of the same size is sent back; False for a tensor that depends on no
    parameter, such as an attention mask."""

    __pydantic_config__ = _STORED


@dataclass(frozen=True)
class Profile:
    """Layers in topological order with the tensors between them.

    Raises :class:`BadProfile` if there are no layers, if no layer takes time, if a tensor has a
    consumer that is not after its producer, or if a number is not between 0 and 1e18.
    """

    name: str
    layers: tuple[Layer, ...]
    tensors: tuple[Tensor, ...]
    batch: int | None = None
    """Number of samples that all times and sizes are for; None if the file does not state it."""
    passes: int | None = None
    """Passes that were measured; None if unknown."""
    spread: float | None = None
    """How much the time of a pass changed during the measurement, as a part of it; None if
    unknown."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise BadProfile(f"profile {self.name!r} has no layers; give at least one layer")
        if self.batch is not None and self.batch < 1:
            raise BadProfile(f"profile {self.name!r} has batch={self.batch}; allowed is >= 1")
        _check_number("of the whole model", "spread", self.spread)
        for tensor in self.tensors:
            _check_number(f"tensor of {tensor.producer}", "bytes", tensor.bytes)
            if not 0 <= tensor.producer < tensor.last_consumer < len(self.layers):
                raise BadProfile(
                    f"profile {self.name!r} has a tensor from layer {tensor.producer} to layer "
                    f"{tensor.last_consumer}; allowed is 0 <= from < to < {len(self.layers)}; "
                    "list the layers in an order in which they can run"
                )
        if sum(layer.forward_s + layer.backward_s for layer in self.layers) <= 0:
            raise BadProfile(
                f"profile {self.name!r} has no layer that takes time; a plan needs forward and "
                "backward times; profile the model again"
            )

    def __len__(self) -> int:
        return len(self.layers)

    @cached_property
    def cut_bytes(self) -> Floats:
        """Bytes of tensors that cross each cut, shape (layers + 1,); 0 at both ends."""
        return self._crossing_bytes(self.tensors)

    @cached_property
    def gradient_bytes(self) -> Floats:
        """Bytes of gradients that are sent back over each cut, shape (layers + 1,)."""
        return self._crossing_bytes([t for t in self.tensors if t.gradient])

    def _crossing_bytes(self, tensors: Iterable[Tensor]) -> Floats:
        change = np.zeros(len(self.layers) + 1)
        for tensor in tensors:
            change[tensor.producer + 1] += tensor.bytes
            change[tensor.last_consumer + 1] -= tensor.bytes
        crossing = np.maximum(np.cumsum(change), 0.0)
        crossing[-1] = 0.0  # removes the rounding error of the sum
        return crossing

    @cached_property
    def output_bytes(self) -> Floats:
        """Bytes of the tensors that each layer produces for later layers, shape (layers,)."""
        produced = np.zeros(len(self.layers))
        for tensor in self.tensors:
            produced[tensor.producer] += tensor.bytes
        return produced

    @property
    def memory_measured(self) -> bool:
        """Whether ``stored_bytes`` of every layer is known; otherwise memory is a lower bound."""
        return all(layer.stored_bytes is not None for layer in self.layers)


def chain(
    name: str, layers: Sequence[Layer], boundary_bytes: Sequence[float], batch: int | None = None
) -> Profile:
    """Build a profile in which layer i sends ``boundary_bytes[i]`` bytes to layer i + 1 only."""
    if len(boundary_bytes) != len(layers) - 1:
        raise BadProfile(
            f"a chain of {len(layers)} layers has {len(boundary_bytes)} boundaries; give one size "
            f"for each of its {len(layers) - 1} boundaries"
        )
    tensors = tuple(Tensor(i, i + 1, size) for i, size in enumerate(boundary_bytes))
    return Profile(name, tuple(layers), tensors, batch)


def _check_number(name: str, field: str, value: float | None) -> None:
    if value is not None and not 0 <= value <= MAX_NUMBER:
        raise BadProfile(
            f"layer {name!r} has {field}={value}; allowed are numbers from 0 to {MAX_NUMBER:g}; "
            "correct the profile"
        )
