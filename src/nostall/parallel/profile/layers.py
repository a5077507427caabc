"""A model's profile: layers in one topological order, and the tensors that pass between them.

A cut at position ``p`` puts the layers before ``p`` on one side.  A prefix of a topological order
is closed under predecessors, so every such cut is convex, whatever the graph; cuts that are not
prefixes of this order are not considered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from nostall.parallel.errors import BadProfile

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer at the profile's batch size.

    Times in seconds, sizes in bytes.  ``stored_bytes`` is what the layer keeps from its forward to
    its backward pass, measured; None when nobody measured it, and then memory is a lower bound.
    ``weight_gradient_s`` is the part of ``backward_s`` that only the parameters' gradients need
    (the W of zero-bubble schedules); None when unknown.
    """

    name: str
    forward_s: float
    backward_s: float
    parameter_bytes: float = 0.0
    stored_bytes: float | None = None
    weight_gradient_s: float | None = None

    def __post_init__(self) -> None:
        for field in ("forward_s", "backward_s", "parameter_bytes", "stored_bytes"):
            _check(self.name, field, getattr(self, field))
        _check(self.name, "weight_gradient_s", self.weight_gradient_s)
        if self.weight_gradient_s is not None and self.weight_gradient_s > self.backward_s:
            raise BadProfile(
                f"layer {self.name!r} has weight_gradient_s={self.weight_gradient_s}, more than "
                f"its backward_s={self.backward_s}; it is a part of it; profile the layer again"
            )


@dataclass(frozen=True, slots=True)
class Tensor:
    """What layer ``producer`` hands to layers up to and including ``last_consumer``.

    Stages pass a tensor on to their neighbours only, so it is charged at every cut in between.
    ``gradient`` says whether a gradient of the same size comes back; none does for what depends
    on no parameter, such as an attention mask.
    """

    producer: int
    last_consumer: int
    bytes: float
    gradient: bool = True


@dataclass(frozen=True)
class Profile:
    """Layers in topological order with their tensors.

    ``batch`` is the number of samples that all figures are for; None when the file does not say.
    Raises :class:`BadProfile` for no layers, tensors that run backwards or figures that are
    negative, infinite or not numbers.
    """

    name: str
    layers: tuple[Layer, ...]
    tensors: tuple[Tensor, ...]
    batch: int | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise BadProfile(f"profile {self.name!r} has no layers; at least one is needed")
        if self.batch is not None and self.batch < 1:
            raise BadProfile(f"profile {self.name!r} has batch={self.batch}; allowed is >= 1")
        for tensor in self.tensors:
            _check(f"tensor of {tensor.producer}", "bytes", tensor.bytes)
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
        """Bytes that cross the cut at each position, shape (layers + 1,); 0 at both ends."""
        return self._crossing(self.tensors)

    @cached_property
    def gradient_bytes(self) -> Floats:
        """Bytes that come back over the cut at each position, shape (layers + 1,)."""
        return self._crossing([t for t in self.tensors if t.gradient])

    def _crossing(self, tensors: Iterable[Tensor]) -> Floats:
        change = np.zeros(len(self.layers) + 1)
        for tensor in tensors:
            change[tensor.producer + 1] += tensor.bytes
            change[tensor.last_consumer + 1] -= tensor.bytes
        crossing = np.maximum(np.cumsum(change), 0.0)
        crossing[-1] = 0.0  # rounding of the sum
        return crossing

    @cached_property
    def output_bytes(self) -> Floats:
        """Bytes that each layer produces for others, shape (layers,)."""
        produced = np.zeros(len(self.layers))
        for tensor in self.tensors:
            produced[tensor.producer] += tensor.bytes
        return produced

    @property
    def memory_measured(self) -> bool:
        """Whether every layer says what it stores; otherwise memory is a lower bound."""
        return all(layer.stored_bytes is not None for layer in self.layers)

    def prefix(self, values: Iterable[float]) -> Floats:
        """Sums of the first 0, 1, ... values, shape (layers + 1,)."""
        return np.concatenate([[0.0], np.cumsum(np.fromiter(values, dtype=np.float64))])


def chain(
    name: str, layers: Sequence[Layer], boundary_bytes: Sequence[float], batch: int | None = None
) -> Profile:
    """A profile in which each layer feeds the next; ``boundary_bytes[i]`` between i and i + 1."""
    if len(boundary_bytes) != len(layers) - 1:
        raise BadProfile(
            f"a chain of {len(layers)} layers has {len(boundary_bytes)} boundaries; allowed is "
            "one fewer than layers"
        )
    tensors = tuple(Tensor(i, i + 1, size) for i, size in enumerate(boundary_bytes))
    return Profile(name, tuple(layers), tensors, batch)


def _check(name: str, field: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value >= 0):
        raise BadProfile(
            f"layer {name!r} has {field}={value}; allowed are finite numbers >= 0; correct the "
            "profile"
        )
