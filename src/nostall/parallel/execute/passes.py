"""Forward and backward passes of a stage on one rank, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from nostall.parallel.execute.private import Groups, backward_of_inputs, backward_of_weights
from nostall.parallel.module.piece import Piece

Tensors = dict[str, torch.Tensor]


@dataclass
class _Held:
    """What one micro-batch keeps from its forward to its backward pass."""

    piece: Piece
    given: Tensors
    made: Tensors
    groups: Groups | None = None
    ends: tuple[list[torch.Tensor], list[torch.Tensor | None]] = ([], [])


@dataclass
class StagePasses:
    """The passes of one stage; ``weight`` of a loss is its samples' part in the iteration's."""

    parameters: list[torch.nn.Parameter]
    recompute: bool
    _held: dict[int, _Held] = field(default_factory=dict)

    def forward(
        self,
        micro_batch: int,
        piece: Piece,
        received: Tensors,
        batch: tuple[Any, Any],
        weight: float,
    ) -> tuple[Tensors, torch.Tensor | None]:
        """What goes to the next stage, and the weighted loss of the last one."""
        given = {name: _leaf(received[name]) for name in piece.received}
        used = {name: given[name] for name in piece.used}
        if self.recompute:
            made = checkpoint(piece, used, *batch, use_reentrant=False)
        else:
            made = piece(used, *batch)
        loss = None
        if "loss" in made:
            made = {"loss": made["loss"] * weight}
            loss = made["loss"].detach()
        sent = {name: made[name] if name in made else received[name] for name in piece.sent}
        self._held[micro_batch] = _Held(piece, given, made)
        return {name: value.detach() for name, value in sent.items()}, loss

    def backward(self, micro_batch: int, gradients: Tensors) -> Tensors:
        """The whole backward pass; returns the gradients of what was received."""
        held = self._held.pop(micro_batch)
        ends, seeds = _ends(held.made, gradients)
        if ends:
            torch.autograd.backward(ends, seeds)
        return _handed(held, gradients)

    def backward_inputs(self, micro_batch: int, gradients: Tensors) -> Tensors:
        """The half of the backward pass that earlier stages wait for."""
        held = self._held[micro_batch]
        held.ends = _ends(held.made, gradients)
        into = [held.given[name] for name in held.piece.used if held.given[name].requires_grad]
        # Without anything to hand back all gradients are the weights' own and come later.
        if into and held.ends[0]:
            held.groups = backward_of_inputs(*held.ends, into, self._weights())
            held.ends = ([], [])
        return _handed(held, gradients)

    def backward_weights(self, micro_batch: int) -> None:
        """The other half."""
        held = self._held.pop(micro_batch)
        if held.groups is not None:
            backward_of_weights(self._weights(), held.groups)
        elif held.ends[0]:
            torch.autograd.backward(*held.ends)

    def _weights(self) -> Iterator[torch.nn.Parameter]:
        return iter([p for p in self.parameters if p.requires_grad])


def _leaf(value: torch.Tensor) -> torch.Tensor:
    leaf = value.detach()
    return leaf.requires_grad_(leaf.is_floating_point())


def _ends(
    made: Tensors, gradients: Tensors
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Values with a gradient, and it; None for the loss, whose gradient is 1."""
    names = [name for name, value in made.items() if value.requires_grad]
    return [made[name] for name in names], [gradients.get(name) for name in names]


def _handed(held: _Held, gradients: Tensors) -> Tensors:
    """Gradients of what was received; what was handed through to later stages adds theirs."""
    found: Tensors = {}
    for name, leaf in held.given.items():
        if not leaf.requires_grad:
            continue
        later = gradients.get(name) if name in held.piece.sent else None
        own = leaf.grad
        if own is None or later is None:
            found[name] = (
                torch.zeros_like(leaf) if own is later else own if later is None else later
            )
        else:
            found[name] = own + later
    return found
