"""Devices of a mesh that run a plan, one of them in each process.

Values are lists with one local tensor for each device that the process holds: one, none outside of
the mesh, or all where a process simulates a mesh.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from nostall.parallel.sharding.placements import (
    PARTIAL_MEAN,
    Placements,
    Step,
    StepKind,
    is_sharded,
    redistribution,
    shard_dim,
)

Values = list[torch.Tensor]
# torch 2.13 renamed these; the old names warn.
_all_gather_single: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Devices(Protocol):
    """Devices of a mesh and the collectives between those along one mesh dimension."""

    mesh: tuple[int, ...]
    coordinates: list[tuple[int, ...]]
    """Coordinates in the mesh of each device that this process holds."""
    collectives: Counter[StepKind]
    """Collectives that were called so far, by kind."""

    def gather(self, values: Values, mesh_dim: int) -> Values:
        """For each held device, the stacked tensors of all devices along a mesh dimension."""
        ...

    def add(self, values: Values, mesh_dim: int) -> Values:
        """For each held device, the sum of the tensors along a mesh dimension.

        The tensors are contiguous and may be overwritten.
        """
        ...

    def send_parts(self, parts: Values, mesh_dim: int) -> Values:
        """Send part j of each device to device j along a mesh dimension; returns the received.

        The parts are stacked along a new first dimension.
        """
        ...

    def add_parts(self, parts: Values, mesh_dim: int) -> Values:
        """As :meth:`send_parts`, with the sum of the received parts."""
        ...


class ProcessDevices:
    """One device of a mesh in each process of a part of the default process group.

    Ranks are in row order.  A collective call: every process of the default group creates the
    meshes of all parts in the same order.
    """

    def __init__(
        self, mesh: Sequence[int], deadline: float | None = None, first_rank: int = 0
    ) -> None:
        """``deadline`` is the longest wait for another rank in seconds; None is torch's default.

        The mesh has the ranks from ``first_rank`` on; a process outside of it holds no device.
        """
        self.mesh = tuple(mesh)
        self.collectives: Counter[StepKind] = Counter()
        self._backend = dist.get_backend()
        timeout = None if deadline is None else timedelta(seconds=deadline)
        count = int(torch.tensor(self.mesh).prod())
        ranks = torch.arange(first_rank, first_rank + count).reshape(self.mesh)
        own = (ranks == dist.get_rank()).nonzero().tolist()
        self.coordinates = [tuple(place) for place in own]
        self._group: list[Any] = []
        self._created: list[Any] = []
        for mesh_dim in range(len(self.mesh)):
            # Creating a group is a collective call: all ranks create all groups in one order.
            lines = ranks.movedim(mesh_dim, -1).reshape(-1, self.mesh[mesh_dim]).tolist()
            groups = {
                tuple(line): dist.new_group(line, timeout=timeout, pg_options=_group_options())
                for line in lines
            }
            self._created += groups.values()
            own_group = (g for line, g in groups.items() if dist.get_rank() in line)
            self._group.append(next(own_group, None))

    def close(self) -> None:
        """Destroy the process groups."""
        for group in self._created:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        self._created.clear()

    def gather(self, values: Values, mesh_dim: int) -> Values:
        (value,) = values
        received = value.new_empty((self.mesh[mesh_dim], *value.shape))
        sent = value.contiguous().flatten()
        _all_gather_single(received.flatten(), sent, group=self._group[mesh_dim])
        return [received]

    def add(self, values: Values, mesh_dim: int) -> Values:
        (value,) = values
        dist.all_reduce(value, group=self._group[mesh_dim])
        return [value]

    def send_parts(self, parts: Values, mesh_dim: int) -> Values:
        (sent,) = parts
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group[mesh_dim])
        return [received]

    def add_parts(self, parts: Values, mesh_dim: int) -> Values:
        if self._backend != "nccl":  # gloo has no reduce-scatter
            return [received.sum(0) for received in self.send_parts(parts, mesh_dim)]
        (sent,) = parts
        total = sent.new_empty(sent.shape[1:])
        _reduce_scatter_single(total, sent.flatten(0, 1), group=self._group[mesh_dim])
        return [total]


def _group_options() -> Any:
    """Collectives of NCCL come before kernels that did not start yet, so that they run beside
    large matrix products; None for other backends."""
    if dist.get_backend() != "nccl":
        return None
    options: Any = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    return options


def placed_leaves(
    leaves: Sequence[Any], examples: Sequence[Any], device: torch.device
) -> list[Any]:
    """Values of a batch on a device, contiguous where those of the trace are.

    The trace has no copy there for kernels that need contiguous tensors.
    """
    moved = [v.to(device) if isinstance(v, torch.Tensor) else v for v in leaves]
    return [
        own.contiguous() if isinstance(example, torch.Tensor) and example.is_contiguous() else own
        for own, example in zip(moved, examples, strict=True)
    ]


def redistribute(
    devices: Devices, values: Values, source: Placements, target: Placements
) -> Values:
    """Change the placements of a tensor; raises AssertionError if they cannot be changed so."""
    steps = redistribution(source, target)
    assert steps is not None, (source, target)
    for step in steps:
        values = _STEPS[step.kind](devices, values, step)
        devices.collectives[step.kind] += 1
    return values


def together(devices: Devices, tensors: Sequence[Values], steps: Sequence[Step]) -> list[Values]:
    """Sum or gather tensors of one type by one collective; ``steps`` has the step of each.

    All steps have the same kind and mesh dimension, and those of sums the same source.
    """
    (kind,) = {step.kind for step in steps}
    devices.collectives[kind] += 1
    return _TOGETHER[kind](devices, tensors, steps)


def sum_in_place(devices: Devices, values: Values, step: Step) -> Values:
    """An all-reduce that overwrites contiguous tensors, which nothing reads afterwards."""
    devices.collectives[step.kind] += 1
    return _mean(devices, devices.add(values, step.mesh_dim), step)


def holds_memory_alone(value: torch.Tensor) -> bool:
    """Whether no other tensor has a part of the memory of one."""
    storage = value.untyped_storage()
    # The tensor and the Python object of its storage; PyTorch's trees of CUDA graphs count so.
    return bool(torch._C._storage_Use_Count(storage._cdata) == 2)


def _reduce_together(
    devices: Devices, tensors: Sequence[Values], steps: Sequence[Step]
) -> list[Values]:
    own = range(len(devices.coordinates))
    flat = [torch.cat([values[i].reshape(-1) for values in tensors]) for i in own]
    summed = _mean(devices, devices.add(flat, steps[0].mesh_dim), steps[0])
    parts = [whole.split([values[0].numel() for values in tensors]) for whole in summed]
    return [[parts[i][n].view(tensors[n][i].shape) for i in own] for n in range(len(tensors))]


def _scatter_together(
    devices: Devices, tensors: Sequence[Values], steps: Sequence[Step]
) -> list[Values]:
    size, own = devices.mesh[steps[0].mesh_dim], range(len(devices.coordinates))
    shapes, sent = [], []
    for i in own:
        cut = [
            values[i]
            .unflatten(shard_dim(step.target), (size, -1))
            .movedim(shard_dim(step.target), 0)
            for values, step in zip(tensors, steps, strict=True)
        ]
        shapes = [part.shape[1:] for part in cut]
        sent.append(torch.cat([part.reshape(size, -1) for part in cut], 1))
    summed = _mean(devices, devices.add_parts(sent, steps[0].mesh_dim), steps[0])
    parts = [whole.split([shape.numel() for shape in shapes]) for whole in summed]
    return [[parts[i][n].view(shapes[n]) for i in own] for n in range(len(tensors))]


def _gather_together(
    devices: Devices, tensors: Sequence[Values], steps: Sequence[Step]
) -> list[Values]:
    own = range(len(devices.coordinates))
    sent = [torch.cat([values[i].reshape(-1) for values in tensors]) for i in own]
    gathered = devices.gather(sent, steps[0].mesh_dim)
    parts = [whole.split([values[0].numel() for values in tensors], 1) for whole in gathered]
    return [
        [
            _join(parts[i][n].reshape(-1, *values[i].shape), shard_dim(steps[n].source))
            for i in own
        ]
        for n, values in enumerate(tensors)
    ]  # fmt: skip


_TOGETHER: dict[
    StepKind, Callable[[Devices, Sequence[Values], Sequence[Step]], list[Values]]
] = {
    "all-reduce": _reduce_together,
    "reduce-scatter": _scatter_together,
    "all-gather": _gather_together,
}  # fmt: skip


def _join(parts: torch.Tensor, dim: int) -> torch.Tensor:
    """Stacked parts one after the other along dimension ``dim``; a copy unless it is the first."""
    return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(), dim)


def _cut(value: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Equal parts along dimension ``dim``, stacked; a copy unless it is the first."""
    if dim == 0:
        return value.contiguous().unflatten(0, (size, -1))
    return torch.stack(value.chunk(size, dim))


def _all_gather(devices: Devices, values: Values, step: Step) -> Values:
    dim = shard_dim(step.source)
    return [_join(parts, dim) for parts in devices.gather(values, step.mesh_dim)]


def _all_reduce(devices: Devices, values: Values, step: Step) -> Values:
    copies = [value.clone(memory_format=torch.contiguous_format) for value in values]
    return _mean(devices, devices.add(copies, step.mesh_dim), step)


def _reduce_scatter(devices: Devices, values: Values, step: Step) -> Values:
    """Each device receives the sum of its part of all tensors."""
    dim, size = shard_dim(step.target), devices.mesh[step.mesh_dim]
    parts = [_cut(value, dim, size) for value in values]
    return _mean(devices, devices.add_parts(parts, step.mesh_dim), step)


def _all_to_all(devices: Devices, values: Values, step: Step) -> Values:
    dim, size = shard_dim(step.target), devices.mesh[step.mesh_dim]
    parts = [_cut(value, dim, size) for value in values]
    received = devices.send_parts(parts, step.mesh_dim)
    return [_join(parts, shard_dim(step.source)) for parts in received]


def _slice(devices: Devices, values: Values, step: Step) -> Values:
    """The own shard, contiguous: PyTorch's layer norm is wrong for statistics that are not."""
    size = devices.mesh[step.mesh_dim]
    return [
        value.chunk(size, shard_dim(step.target))[own[step.mesh_dim]].contiguous()
        for value, own in zip(values, devices.coordinates, strict=True)
    ]


def _zero(devices: Devices, values: Values, step: Step) -> Values:
    return [
        value if own[step.mesh_dim] == 0 else torch.zeros_like(value)
        for value, own in zip(values, devices.coordinates, strict=True)
    ]


def _mean(devices: Devices, values: Values, step: Step) -> Values:
    """Divide by the number of devices if the source is a partial mean."""
    if step.source != PARTIAL_MEAN:
        return values
    return [value / devices.mesh[step.mesh_dim] for value in values]


_STEPS: dict[StepKind, Callable[[Devices, Values, Step], Values]] = {
    "all-gather": _all_gather,
    "all-reduce": _all_reduce,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "slice": _slice,
    "zero": _zero,
    "scale": _mean,
}


def scatter(devices: Devices, value: torch.Tensor, placements: Placements) -> Values:
    """Local tensors of a whole tensor that every process has, for shards and replication."""
    replicated = ("R",) * len(devices.mesh)
    assert all(is_sharded(p) or p == "R" for p in placements)
    return redistribute(devices, [value for _ in devices.coordinates], replicated, placements)
