"""Messages between neighbouring stages: point to point, one process group a boundary and direction.

Within a group all messages run the same way and in the order of micro-batches, so that neither
side waits for a message that the other will only send later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from nostall.parallel.execute.slow import Delays, SlowLinks
from nostall.parallel.module.model import Model
from nostall.parallel.plan import Plan
from nostall.parallel.slices import Message, Slices

Tensors = dict[str, torch.Tensor]


@dataclass
class Link:
    """One boundary of one rank, in both directions."""

    model: Model
    plan: Plan
    slices: Slices
    boundary: int
    rank: int
    device: torch.device
    groups: tuple[Any, Any]
    slow: SlowLinks | None = None
    delays: Delays | None = None
    _sent: list[tuple[Any, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names = self.model.crossing(self.plan.stages[self.boundary].end)
        self.before = self.plan.stages[self.boundary].gpus
        self.behind = self.plan.stages[self.boundary + 1].gpus

    def send_forward(self, micro_batch: int, values: Tensors) -> None:
        """Slices of what this rank's replica made, to all replicas that need some of it."""
        source = self.before.index(self.rank)
        start = self.slices.part(self.boundary, source, micro_batch)[0]
        parts = [
            (self.behind[message.target], part)
            for message in self._messages(micro_batch, source=source)
            for part in self._parts(message, values, start, self.names)
        ]
        self._send(0, parts)

    def receive_forward(self, micro_batch: int) -> Receipt:
        """Begin to receive what this rank's replica computes on."""
        target = self.behind.index(self.rank)
        part = self.slices.part(self.boundary + 1, target, micro_batch)
        return self._receive(0, part, self._messages(micro_batch, target=target), self.names)

    def send_backward(self, micro_batch: int, gradients: Tensors) -> None:
        """Slices of the gradients, back to the replicas that made the values."""
        target = self.behind.index(self.rank)
        start = self.slices.part(self.boundary + 1, target, micro_batch)[0]
        parts = [
            (self.before[message.source], part)
            for message in self._messages(micro_batch, target=target)
            for part in self._parts(message, gradients, start, self._differentiable)
        ]
        self._send(1, parts)

    def receive_backward(self, micro_batch: int) -> Receipt:
        """Begin to receive the gradients of what this rank's replica made."""
        source = self.before.index(self.rank)
        part = self.slices.part(self.boundary, source, micro_batch)
        messages = self._messages(micro_batch, source=source)
        return self._receive(1, part, messages, self._differentiable)

    def finish(self) -> None:
        """Wait until everything that was sent is on its way."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    @property
    def _differentiable(self) -> tuple[str, ...]:
        return tuple(n for n in self.names if self.model.dtype(n).is_floating_point)

    def _messages(self, micro_batch: int, source: int = -1, target: int = -1) -> list[Message]:
        return [
            message
            for message in self.slices.messages(self.boundary, micro_batch)
            if source in (-1, message.source) and target in (-1, message.target)
        ]

    def _parts(
        self, message: Message, values: Tensors, start: int, names: tuple[str, ...]
    ) -> list[torch.Tensor]:
        parts = []
        for name in names:
            dim = self.model.rows[name]
            if dim is not None:
                size = message.end - message.first
                parts.append(values[name].narrow(dim, message.first - start, size).contiguous())
            elif message.whole:
                parts.append(values[name].contiguous())
        return parts

    def _receive(
        self, way: int, part: tuple[int, int], messages: list[Message], names: tuple[str, ...]
    ) -> Receipt:
        buffers: list[tuple[str, int, torch.Tensor]] = []
        operations = []
        for message in messages:
            peer = self.before[message.source] if way == 0 else self.behind[message.target]
            for name in names:
                if self.model.rows[name] is None and not message.whole:
                    continue
                shape = self.model.shape(name, message.end - message.first)
                buffer = torch.empty(shape, dtype=self.model.dtype(name), device=self.device)
                buffers.append((name, message.first, buffer))
                operations.append(dist.P2POp(dist.irecv, buffer, peer, self.groups[way]))
        works = dist.batch_isend_irecv(operations) if operations else []
        return Receipt(self, part, names, buffers, works)

    def _send(self, way: int, parts: list[tuple[int, torch.Tensor]]) -> None:
        if not parts:
            return
        tensors = [tensor.detach() for _, tensor in parts]
        operations = [
            dist.P2POp(dist.isend, tensor, peer, self.groups[way])
            for (peer, _), tensor in zip(parts, tensors, strict=True)
        ]
        works = self._begin(way, operations, tensors)
        # What is through lets go of its tensors.
        self._sent = [pair for pair in self._sent if not pair[0].is_completed()]
        self._sent.extend((work, tensors) for work in works)

    def _begin(self, way: int, operations: list[Any], tensors: list[torch.Tensor]) -> list[Any]:
        def begin() -> list[Any]:
            return list(dist.batch_isend_irecv(operations))

        if self.slow is None or self.delays is None:
            return begin()
        seconds = self.slow.message_s(sum(t.numel() * t.element_size() for t in tensors))
        begun: list[Any] = self.delays.late(f"{self.boundary} {way}", seconds, tensors, begin)
        return begun


@dataclass
class Receipt:
    """Tensors under way to this rank."""

    link: Link
    part: tuple[int, int]
    names: tuple[str, ...]
    buffers: list[tuple[str, int, torch.Tensor]]
    works: list[Any]

    def wait(self) -> Tensors:
        """The tensors, put together from their slices; whole ones that came often are added up."""
        for work in self.works:
            work.wait()
        found: Tensors = {}
        for name in self.names:
            parts = [buffer for own, _, buffer in self.buffers if own == name]
            dim = self.link.model.rows[name]
            if len(parts) == 1:
                found[name] = parts[0]
            elif parts and dim is not None:
                found[name] = torch.cat(parts, dim)
            elif parts:
                found[name] = torch.stack(parts).sum(0)
            else:  # nobody used what this replica made of it
                shape = self.link.model.shape(name, self.part[1] - self.part[0])
                kind = self.link.model.dtype(name)
                found[name] = torch.zeros(shape, dtype=kind, device=self.link.device)
        return found
