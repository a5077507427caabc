"""Sums of gradients over all ranks that hold a parameter.

Each rank's gradient is the part that its samples contribute, so sums are right for replicas of a
stage and for parameters that several stages use (tied embeddings) alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from nostall.parallel.execute.groups import Groups
from nostall.parallel.execute.slow import Delays, SlowLinks
from nostall.parallel.module.model import Model
from nostall.parallel.plan import Plan

BUCKET_BYTES = 16 << 20
"""Gradients go out together up to this size: one message each would be too many."""


class GradientSums:
    """The all-reduces of one rank.  Every rank of the run must make one, at the same point."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        rank: int,
        groups: Groups,
        slow: SlowLinks | None = None,
        delays: Delays | None = None,
    ) -> None:
        holders: dict[int, set[int]] = {}
        by_id: dict[int, torch.nn.Parameter] = {}
        used = [model.stage_parameters(s.first, s.end) for s in plan.stages]
        for stage, parameters in zip(plan.stages, used, strict=True):
            for parameter in parameters:
                by_id[id(parameter)] = parameter
                holders.setdefault(id(parameter), set()).update(stage.gpus)
        self.groups: dict[tuple[int, ...], Any] = {}
        for found in holders.values():
            key = tuple(sorted(found))
            if len(key) > 1 and key not in self.groups:
                self.groups[key] = groups.of(key, "gradients")
        self.own = [by_id[i] for i, found in holders.items() if rank in found]
        self._key = {i: tuple(sorted(found)) for i, found in holders.items()}
        # Of each group, in the order in which a backward pass makes them: all ranks of a group send
        # the same, in the same order, whatever became ready first on each.
        self._lines: dict[tuple[int, ...], list[torch.nn.Parameter]] = {}
        for parameter in reversed(self.own):
            key = self._key[id(parameter)]
            if len(key) > 1 and parameter.requires_grad:
                self._lines.setdefault(key, []).append(parameter)
        self._ready: set[int] = set()
        self._sent_of: dict[tuple[int, ...], int] = {}
        self._sent: list[tuple[Any, torch.Tensor, list[torch.nn.Parameter]]] = []
        self._alone = len(plan.stages) == 1
        self._hooks: list[Any] = []
        self._slow, self._delays = slow, delays

    def broadcast(self) -> None:
        """Give every holder the parameters of the first one, and bring up the groups."""
        for parameter in self.own:
            key = self._key[id(parameter)]
            if len(key) > 1:
                with torch.no_grad():
                    dist.broadcast(parameter.data, key[0], group=self.groups[key])

    def stage_done(self, parameters: Sequence[torch.nn.Parameter], stage: Sequence[int]) -> None:
        """A stage's last gradients are there: those that no other stage adds to go out."""
        key = tuple(sorted(stage))
        self._ready |= {id(p) for p in parameters if self._key[id(p)] == key}
        self._send(key)

    def listen(self) -> None:
        """Send gradients out as the coming backward pass makes them, for data parallelism."""
        if not self._alone:
            return
        for parameter in self.own:
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._made))

    def finish(self) -> None:
        """Send what has not gone out, wait, and put the sums where optimisers look."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._ready = {id(parameter) for parameter in self.own}
        for key in self._lines:
            self._send(key)
        for work, flat, parameters in self._sent:
            work.wait()
            at = 0
            for parameter in parameters:
                size = parameter.numel()
                assert parameter.grad is not None  # made when it was sent
                parameter.grad.copy_(flat[at : at + size].view_as(parameter))
                at += size
        self._sent.clear()
        self._sent_of.clear()
        self._ready.clear()

    def _made(self, parameter: torch.nn.Parameter) -> None:
        self._ready.add(id(parameter))
        self._send(self._key[id(parameter)])

    def _send(self, key: tuple[int, ...]) -> None:
        """Send what is ready of a group's line, in full buckets, and the last one as it is."""
        line = self._lines.get(key, [])
        bucket: list[torch.nn.Parameter] = []
        for parameter in line[self._sent_of.get(key, 0) :]:
            if id(parameter) not in self._ready:
                return
            bucket.append(parameter)
            if _ends(bucket, parameter is line[-1], line):
                self._sum(key, bucket)
                self._sent_of[key] = self._sent_of.get(key, 0) + len(bucket)
                bucket = []

    def _sum(self, key: tuple[int, ...], parameters: list[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is None:  # no sample of this replica reached it
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None])
        self._sent.append((self._begin(key, flat), flat, parameters))

    def _begin(self, key: tuple[int, ...], flat: torch.Tensor) -> Any:
        def begin() -> Any:
            return dist.all_reduce(flat, group=self.groups[key], async_op=True)

        if self._slow is None or self._delays is None:
            return begin()
        seconds = self._slow.allreduce_s(flat.numel() * flat.element_size(), len(key))
        return self._delays.late("gradients", seconds, [flat], begin)


def _ends(
    bucket: Sequence[torch.nn.Parameter], last: bool, line: Sequence[torch.nn.Parameter]
) -> bool:
    """Whether a bucket goes out: it is full, the line ends, or another element type follows."""
    size = sum(p.numel() * p.element_size() for p in bucket)
    if last or size >= BUCKET_BYTES:
        return True
    behind = next(i for i, p in enumerate(line) if p is bucket[-1]) + 1
    return bool(line[behind].dtype != bucket[-1].dtype)
