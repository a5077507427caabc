"""Processes of the stages of a hybrid plan, and the tensors that stages send each other.

Ranks of a stage have consecutive numbers.  The first rank of a stage sends whole tensors to all
ranks of a neighbour.  Each direction over each boundary has a process group of its own, in which
all tensors come in the order of micro-batches, so that no rank waits for a tensor that its peer
sends only later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any, Literal

import torch
import torch.distributed as dist

from nostall.parallel.sharding.program.devices import ProcessDevices
from nostall.parallel.sharding.program.sends import Sends

Direction = Literal["forward", "backward"]
Operation = tuple[Direction, int]
"""The pass of a micro-batch."""
_CPU = torch.device("cpu")


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Operation]:
    """The passes of a stage in the order 1F1B: warm-up, forward and backward in turn, the rest."""
    forward: list[Operation] = [("forward", number) for number in range(micro_batches)]
    backward: list[Operation] = [("backward", number) for number in range(micro_batches)]
    ahead = min(stages - 1 - stage, micro_batches)
    in_turn = chain.from_iterable(zip(forward[ahead:], backward, strict=False))
    return [*forward[:ahead], *in_turn, *backward[micro_batches - ahead :]]


class StageProcesses:
    """The processes of all stages, from this rank's side.

    A collective call: every rank creates them.  One object serves all plans whose stages have these
    numbers of GPUs.
    """

    def __init__(
        self, sizes: Sequence[int], device: torch.device = _CPU, deadline: float | None = None
    ) -> None:
        """``sizes`` are the numbers of ranks of the stages, together all ranks.

        ``deadline`` is the longest wait for another rank in seconds; None is torch's default.
        """
        self.device, self.stages = device, len(sizes)
        self.firsts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        """First rank of each stage, and the number of ranks."""
        meshes = [
            ProcessDevices((size,), deadline, first)
            for size, first in zip(sizes, self.firsts, strict=False)
        ]
        self._meshes = meshes
        self.number = next(i for i, mesh in enumerate(meshes) if mesh.coordinates)
        """Stage of this rank."""
        self.devices = meshes[self.number]
        """The ranks of this rank's stage."""
        self._timeout = None if deadline is None else timedelta(seconds=deadline)
        boundaries = range(len(sizes) - 1)
        self._to_next = [self._group(boundary, boundary + 1) for boundary in boundaries]
        self._to_previous = [self._group(boundary + 1, boundary) for boundary in boundaries]
        self._sends = Sends()

    @property
    def is_first_of_stage(self) -> bool:
        """Whether this rank sends the tensors of its stage."""
        return bool(dist.get_rank() == self.firsts[self.number])

    def send(self, direction: Direction, tensors: Iterable[torch.Tensor]) -> None:
        """Start to send tensors to all ranks of a neighbour, if this rank is its stage's first.

        The neighbour is the next stage for ``forward`` and the stage before for ``backward``.
        """
        if not self.is_first_of_stage:
            return
        for tensor in tensors:
            is_forward = direction == "forward"
            group = self._to_next[self.number] if is_forward else self._to_previous[self.number - 1]
            sent = tensor.contiguous()
            work = dist.broadcast(sent, dist.get_rank(), group=group, async_op=True)
            self._sends.add(work, sent)

    def receive(self, direction: Direction, tensors: Sequence[torch.Tensor]) -> None:
        """Receive into tensors, in the order in which they are sent.

        A GPU waits for them before its next kernel.  To receive earlier, beside operators, would
        take multiprocessors from these while NCCL waits for the sender.
        """
        is_forward = direction == "forward"
        for tensor in tensors:
            group = self._to_next[self.number - 1] if is_forward else self._to_previous[self.number]
            source = self.firsts[self.number + (-1 if is_forward else 1)]
            dist.broadcast(tensor, source, group=group)

    def finish(self) -> None:
        """Wait until all sends are done."""
        self._sends.finish()

    def forget(self) -> None:
        """Drop the sends of a capture that failed."""
        self._sends.forget()

    def close(self) -> None:
        """Destroy the process groups; no rank may have messages under way."""
        for mesh in self._meshes:
            mesh.close()
        for group in (*self._to_next, *self._to_previous):
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)

    def _group(self, source: int, target: int) -> Any:
        """The group of a stage's first rank and all ranks of a neighbour.

        NCCL connects the ranks of a group in its first call, and may block a process until the
        others are there, so this is a call that all of them make.
        """
        receivers = range(self.firsts[target], self.firsts[target + 1])
        members = sorted([self.firsts[source], *receivers])
        group = dist.new_group(members, timeout=self._timeout)
        if dist.get_rank() in members:
            dist.all_reduce(torch.zeros(1, device=self.device), group=group)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        return group
