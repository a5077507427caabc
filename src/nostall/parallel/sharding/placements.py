"""Placements of a tensor on a device mesh, and the collectives that change one into another.

A placement is text, one for each mesh dimension: ``R`` (replicated), ``S0``, ``S1``, ... (sharded
evenly along that tensor dimension), ``P`` (partial: the tensor is the sum over the mesh dimension)
or ``A`` (partial: it is the mean).  These are DTensor's Replicate, Shard, Partial("sum") and
Partial("avg").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

Placement = str
Placements = tuple[Placement, ...]
"""Placements of one tensor, one for each mesh dimension, outermost first."""
REPLICATED: Placement = "R"
PARTIAL_SUM: Placement = "P"
PARTIAL_MEAN: Placement = "A"
Collective = Literal["all-gather", "all-reduce", "reduce-scatter", "all-to-all"]
StepKind = Literal[
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "slice", "zero", "scale"
]
"""The last three send nothing: ``slice`` keeps the own shard, ``zero`` keeps a replicated tensor on
the first device and zeros on the others (a partial sum), ``scale`` divides a partial mean by the
number of devices (a partial sum)."""
COLLECTIVES: tuple[Collective, ...] = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all")


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to run an operator on a mesh dimension: placements of its inputs and outputs.

    If each device runs the operator on its local inputs, its results are the local outputs.
    """

    inputs: Placements
    outputs: Placements

    @property
    def splits_work(self) -> bool:
        """Whether the devices share the work; if not, each of them does all of it."""
        return any(is_sharded(p) for p in (*self.inputs, *self.outputs))


@dataclass(frozen=True, slots=True)
class Step:
    """One change of the placement of a tensor on one mesh dimension."""

    mesh_dim: int
    source: Placement
    target: Placement

    @property
    def kind(self) -> StepKind:
        """The collective, or what happens without one."""
        kind = step_kind(self.source, self.target)
        assert kind is not None  # redistribution() makes only feasible steps
        return kind


def shard(dim: int) -> Placement:
    """The placement of a tensor that is sharded along dimension ``dim``."""
    return f"S{dim}"


def is_sharded(placement: Placement) -> bool:
    """Whether a placement is a shard; "" is that of an output without a tensor."""
    return placement.startswith("S")


def is_partial(placement: Placement) -> bool:
    """Whether a placement is a partial sum or mean."""
    return placement in (PARTIAL_SUM, PARTIAL_MEAN)


def shard_dim(placement: Placement) -> int:
    """The tensor dimension of a shard."""
    return int(placement[1:])


def step_kind(source: Placement, target: Placement) -> StepKind | None:
    """How a placement changes into a different one; None if it cannot.

    A shard does not become partial, and nothing becomes a partial mean.
    """
    if is_partial(target):
        kinds: dict[tuple[Placement, Placement], StepKind] = {
            (REPLICATED, PARTIAL_SUM): "zero",
            (PARTIAL_MEAN, PARTIAL_SUM): "scale",
        }
        return kinds.get((source, target))
    if is_partial(source):
        return "reduce-scatter" if is_sharded(target) else "all-reduce"
    if is_sharded(source):
        return "all-to-all" if is_sharded(target) else "all-gather"
    return "slice"


@cache
def redistribution(source: Placements, target: Placements) -> tuple[Step, ...] | None:
    """Steps from one placement on all mesh dimensions to another; None if there are none.

    Outer mesh dimensions cut a tensor dimension before inner ones.  Thus an inner shard of a tensor
    dimension is gathered first if an outer shard of the same dimension begins or ends.
    """
    current, steps = list(source), list[Step]()

    def change(mesh_dim: int, placement: Placement) -> bool:
        if current[mesh_dim] == placement:
            return True
        if step_kind(current[mesh_dim], placement) is None:
            return False
        steps.append(Step(mesh_dim, current[mesh_dim], placement))
        current[mesh_dim] = placement
        return True

    for inner in reversed(range(len(source))):
        moved = {
            p
            for outer in range(inner)
            if source[outer] != target[outer]
            for p in (source[outer], target[outer])
        }
        if is_sharded(source[inner]) and source[inner] in moved:
            change(inner, REPLICATED)
    # An inner all-to-all or reduce-scatter onto a dimension that an outer step leaves must wait for
    # that step; outermost first is such an order.
    feasible = all(change(mesh_dim, target[mesh_dim]) for mesh_dim in range(len(source)))
    return tuple(steps) if feasible else None


def local_shape(
    shape: Sequence[int], placements: Placements, sizes: Sequence[int]
) -> tuple[int, ...] | None:
    """Shape of a tensor on one device of a mesh of ``sizes``; None if a shard is not even."""
    local = list(shape)
    for placement, size in zip(placements, sizes, strict=True):
        if is_sharded(placement):
            dim = shard_dim(placement)
            if dim >= len(local) or local[dim] % size or local[dim] == 0:
                return None
            local[dim] //= size
    return tuple(local)


def placement_text(placements: Placements) -> str:
    """Placements as they are shown to users: ``S(0)``, ``R``, or ``S(0) R`` on two dimensions."""
    return " ".join(f"S({p[1:]})" if is_sharded(p) else p for p in placements)
