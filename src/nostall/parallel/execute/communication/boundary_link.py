"""Point-to-point messages over a stage boundary, with one process group per direction.

In each group all messages run in one direction and in the order of micro-batches, so no rank waits
for a message that its peer sends only later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from nostall.parallel.module.model import Model
from nostall.parallel.plan import Plan
from nostall.parallel.sharding.program.sends import Sends
from nostall.parallel.slices import Message, Slices

Tensors = dict[str, torch.Tensor]
Direction = Literal["forward", "backward"]


@dataclass
class BoundaryLink:
    """One rank's side of one stage boundary, in both directions."""

    model: Model
    plan: Plan
    slices: Slices
    boundary: int
    """Number of the stage before the boundary."""
    rank: int
    device: torch.device
    groups: dict[Direction, Any]
    _sends: Sends = field(default_factory=Sends)

    def __post_init__(self) -> None:
        self.names = self.model.crossing(self.plan.stages[self.boundary].end)
        """Names of the tensors that cross the boundary."""
        self.sources = self.plan.stages[self.boundary].gpus
        self.targets = self.plan.stages[self.boundary + 1].gpus

    def send_forward(self, micro_batch: int, values: Tensors) -> None:
        """Send slices of this replica's outputs to the next stage's replicas that need them."""
        source = self.sources.index(self.rank)
        start = self.slices.samples(self.boundary, source, micro_batch)[0]
        parts = [
            (self.targets[message.target], part)
            for message in self._messages(micro_batch, source=source)
            for part in self._message_tensors(message, values, start, self.names)
        ]
        self._send("forward", parts)

    def receive_forward(self, micro_batch: int) -> PendingTensors:
        """Start to receive the inputs of this replica."""
        target = self.targets.index(self.rank)
        samples = self.slices.samples(self.boundary + 1, target, micro_batch)
        messages = self._messages(micro_batch, target=target)
        return self._receive("forward", samples, messages, self.names)

    def send_backward(self, micro_batch: int, gradients: Tensors) -> None:
        """Send slices of the gradients back to the replicas that computed the values."""
        target = self.targets.index(self.rank)
        start = self.slices.samples(self.boundary + 1, target, micro_batch)[0]
        parts = [
            (self.sources[message.source], part)
            for message in self._messages(micro_batch, target=target)
            for part in self._message_tensors(message, gradients, start, self._differentiable)
        ]
        self._send("backward", parts)

    def receive_backward(self, micro_batch: int) -> PendingTensors:
        """Start to receive the gradients of this replica's outputs."""
        source = self.sources.index(self.rank)
        samples = self.slices.samples(self.boundary, source, micro_batch)
        messages = self._messages(micro_batch, source=source)
        return self._receive("backward", samples, messages, self._differentiable)

    def finish(self) -> None:
        """Wait until all sends have completed."""
        self._sends.finish()

    @property
    def _differentiable(self) -> tuple[str, ...]:
        return tuple(n for n in self.names if self.model.has_gradient(n))

    def _messages(self, micro_batch: int, source: int = -1, target: int = -1) -> list[Message]:
        return [
            message
            for message in self.slices.messages(self.boundary, micro_batch)
            if source in (-1, message.source) and target in (-1, message.target)
        ]

    def _message_tensors(
        self, message: Message, values: Tensors, start: int, names: tuple[str, ...]
    ) -> list[torch.Tensor]:
        """The tensors of one message; ``start`` is the first sample in ``values``."""
        tensors = []
        for name in names:
            dim = self.model.sample_dim[name]
            if dim is not None:
                size = message.end - message.first
                tensors.append(values[name].narrow(dim, message.first - start, size).contiguous())
            elif message.carries_unbatched:
                tensors.append(values[name].contiguous())
        return tensors

    def _receive(
        self,
        direction: Direction,
        samples: tuple[int, int],
        messages: list[Message],
        names: tuple[str, ...],
    ) -> PendingTensors:
        buffers: list[tuple[str, torch.Tensor]] = []
        operations = []
        for message in messages:
            is_forward = direction == "forward"
            peer = self.sources[message.source] if is_forward else self.targets[message.target]
            for name in names:
                if self.model.sample_dim[name] is None and not message.carries_unbatched:
                    continue
                shape = self.model.shape(name, message.end - message.first)
                buffer = torch.empty(shape, dtype=self.model.dtype(name), device=self.device)
                buffers.append((name, buffer))
                part = _as_real(buffer)
                operations.append(dist.P2POp(dist.irecv, part, peer, self.groups[direction]))
        works = dist.batch_isend_irecv(operations) if operations else []
        return PendingTensors(self, samples[1] - samples[0], names, buffers, works)

    def _send(self, direction: Direction, parts: list[tuple[int, torch.Tensor]]) -> None:
        """Start to send ``parts``, pairs of a peer's rank and a tensor."""
        if not parts:
            return
        tensors = [_as_real(tensor.detach()) for _, tensor in parts]
        operations = [
            dist.P2POp(dist.isend, tensor, peer, self.groups[direction])
            for (peer, _), tensor in zip(parts, tensors, strict=True)
        ]
        for work in dist.batch_isend_irecv(operations):
            self._sends.add(work, tensors)


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    """A complex tensor as its real and imaginary parts, because NCCL has no complex types."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


@dataclass
class PendingTensors:
    """Tensors of one micro-batch that this rank is receiving over a link."""

    link: BoundaryLink
    samples: int
    names: tuple[str, ...]
    buffers: list[tuple[str, torch.Tensor]]
    """Name and slice of each tensor, in the order of the senders."""
    works: list[Any]

    def wait(self) -> Tensors:
        """Wait for the messages; returns each tensor, put together from its slices.

        Slices of a tensor without a sample dimension are summed (they are gradients from several
        replicas).  A tensor for which no message exists is zero: no replica used this rank's
        output.
        """
        for work in self.works:
            work.wait()
        model, device = self.link.model, self.link.device
        tensors: Tensors = {}
        for name in self.names:
            parts = [buffer for buffer_name, buffer in self.buffers if buffer_name == name]
            dim = model.sample_dim[name]
            if len(parts) == 1:
                tensors[name] = parts[0]
            elif parts and dim is not None:
                tensors[name] = torch.cat(parts, dim)
            elif parts:
                tensors[name] = torch.stack(parts).sum(0)
            else:
                shape = model.shape(name, self.samples)
                tensors[name] = torch.zeros(shape, dtype=model.dtype(name), device=device)
        return tensors
