"""All-reduces of gradients over all ranks that hold a parameter.

Each rank's gradient is the part that its own samples contribute, so the sum is right both for
replicas of a stage and for parameters that several stages use (tied embeddings).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from nostall.parallel.execute.communication.process_groups import ProcessGroups
from nostall.parallel.module.model import Model
from nostall.parallel.plan import Plan

BUCKET_BYTES = 16 << 20
"""Gradients are sent together in buckets of about this size, because small messages are slow."""

Ranks = tuple[int, ...]


class GradientReducer:
    """The all-reduces of one rank; every rank of the run must create one at the same point."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        rank: int,
        groups: ProcessGroups,
    ) -> None:
        holders: dict[int, set[int]] = {}
        by_id: dict[int, torch.nn.Parameter] = {}
        stage_parameters = [model.stage_parameters(s.first, s.end) for s in plan.stages]
        for stage, parameters in zip(plan.stages, stage_parameters, strict=True):
            for parameter in parameters:
                by_id[id(parameter)] = parameter
                holders.setdefault(id(parameter), set()).update(stage.gpus)
        self.groups: dict[Ranks, Any] = {}
        for ranks in holders.values():
            key = tuple(sorted(ranks))
            if len(key) > 1 and key not in self.groups:
                self.groups[key] = groups.get(key, "gradients")
        self.parameters = [by_id[i] for i, ranks in holders.items() if rank in ranks]
        """Parameters that this rank holds."""
        self._holders = {i: tuple(sorted(ranks)) for i, ranks in holders.items()}
        # Per group, in the order in which a backward pass computes the gradients.  All ranks of a
        # group reduce the same buckets in this order, whichever gradients are ready first on each.
        self._reduction_order: dict[Ranks, list[torch.nn.Parameter]] = {}
        for parameter in reversed(self.parameters):
            key = self._holders[id(parameter)]
            if len(key) > 1 and id(parameter) in model.trained:
                self._reduction_order.setdefault(key, []).append(parameter)
        self._ready: set[int] = set()
        self._started_counts: dict[Ranks, int] = {}
        self._under_way: list[tuple[Any, torch.Tensor, list[torch.nn.Parameter]]] = []
        self._is_data_parallel = len(plan.stages) == 1
        self._hooks: list[Any] = []

    def is_first_holder(self, parameter: torch.nn.Parameter) -> bool:
        """Whether this rank is the first of those that hold a parameter of its own."""
        return bool(self._holders[id(parameter)][0] == dist.get_rank())

    def broadcast_parameters(self) -> None:
        """Copy each parameter from its first holder to the others, which connects the groups."""
        for parameter in self.parameters:
            key = self._holders[id(parameter)]
            if len(key) > 1:
                with torch.no_grad():
                    dist.broadcast(parameter.data, key[0], group=self.groups[key])

    def reduce_stage(self, parameters: Sequence[torch.nn.Parameter], stage: Sequence[int]) -> None:
        """Start the all-reduces of a stage after its last backward pass.

        ``stage`` is the stage's GPUs.  Parameters that other GPUs hold too wait for :meth:`finish`.
        """
        key = tuple(sorted(stage))
        self._ready |= {id(p) for p in parameters if self._holders[id(p)] == key}
        self._start_ready(key)

    def reduce_during_backward(self) -> None:
        """With data parallelism, start all-reduces as the next backward pass computes gradients."""
        if not self._is_data_parallel:
            return
        for parameter in self.parameters:
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))

    def finish(self) -> None:
        """Start the remaining all-reduces, wait for all, and write the sums to ``.grad``."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._ready = {id(parameter) for parameter in self.parameters}
        for key in self._reduction_order:
            self._start_ready(key)
        for work, flat, parameters in self._under_way:
            work.wait()
            at = 0
            for parameter in parameters:
                size = parameter.numel()
                assert parameter.grad is not None  # _start_bucket sets it
                parameter.grad.copy_(flat[at : at + size].view_as(parameter))
                at += size
        self._under_way.clear()
        self._started_counts.clear()
        self._ready.clear()

    def _on_gradient(self, parameter: torch.nn.Parameter) -> None:
        self._ready.add(id(parameter))
        self._start_ready(self._holders[id(parameter)])

    def _start_ready(self, key: Ranks) -> None:
        """Start the next buckets of a group whose gradients are all ready."""
        order = self._reduction_order.get(key, [])
        bucket: list[torch.nn.Parameter] = []
        for parameter in order[self._started_counts.get(key, 0) :]:
            if id(parameter) not in self._ready:
                return
            bucket.append(parameter)
            if _is_complete(bucket, order):
                self._start_bucket(key, bucket)
                self._started_counts[key] = self._started_counts.get(key, 0) + len(bucket)
                bucket = []

    def _start_bucket(self, key: Ranks, parameters: list[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is None:  # this replica had no samples for the parameter
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
        work = dist.all_reduce(flat, group=self.groups[key], async_op=True)
        self._under_way.append((work, flat, parameters))


def _is_complete(bucket: Sequence[torch.nn.Parameter], order: Sequence[torch.nn.Parameter]) -> bool:
    """Whether a bucket is full, ends the order, or is followed by another element type."""
    size = sum(p.numel() * p.element_size() for p in bucket)
    if bucket[-1] is order[-1] or size >= BUCKET_BYTES:
        return True
    following = next(i for i, p in enumerate(order) if p is bucket[-1]) + 1
    return bool(order[following].dtype != bucket[-1].dtype)
