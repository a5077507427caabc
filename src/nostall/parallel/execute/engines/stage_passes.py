"""Forward and backward passes of one stage on one rank, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from nostall.parallel.execute.engines.torch_internals import (
    ParameterGroups,
    backward_inputs,
    backward_weights,
)
from nostall.parallel.module.model import can_have_gradient
from nostall.parallel.module.segment import Segment

Tensors = dict[str, torch.Tensor]


@dataclass
class _InFlight:
    """Data of one micro-batch, kept from its forward pass to the end of its backward pass."""

    segment: Segment
    inputs: Tensors
    """Received tensors, as leaves of the autograd graph."""
    outputs: Tensors
    parameter_groups: ParameterGroups | None = None
    """After the first half of a split backward pass: what the second half needs."""
    pending: tuple[list[torch.Tensor], list[torch.Tensor | None]] = ([], [])
    """Outputs and their gradients, if the second half runs the whole backward pass."""


@dataclass
class StagePasses:
    """The passes of one stage."""

    parameters: list[torch.nn.Parameter]
    recompute: bool
    """Whether the forward pass runs again before the backward pass (activation checkpointing)."""
    is_random: bool = True
    """Whether passes may draw random numbers, which those that run again draw again."""
    _in_flight: dict[int, _InFlight] = field(default_factory=dict)

    def forward(
        self,
        micro_batch: int,
        segment: Segment,
        received: Tensors,
        batch: tuple[Any, Any],
        weight: float,
        scale: float = 1.0,
    ) -> tuple[Tensors, torch.Tensor | None]:
        """Run the forward pass; returns the tensors for the next stage and the weighted loss.

        The loss is None except in the last stage; ``weight`` is its weight in the loss of the
        iteration, and ``scale`` times that its weight in the gradients.  ``batch`` is this rank's
        part of (inputs, targets).
        """
        inputs = {name: _as_leaf(received[name]) for name in segment.received}
        used = {name: inputs[name] for name in segment.used}
        if self.recompute:
            outputs = checkpoint(
                segment, used, *batch, use_reentrant=False, preserve_rng_state=self.is_random
            )
        else:
            outputs = segment(used, *batch)
        loss = None
        if "loss" in outputs:
            loss = outputs["loss"].detach() * weight
            outputs = {"loss": outputs["loss"] * (weight * scale)}
        sent = {n: outputs[n] if n in outputs else received[n] for n in segment.sent}
        self._in_flight[micro_batch] = _InFlight(segment, inputs, outputs)
        return {name: value.detach() for name, value in sent.items()}, loss

    def backward(self, micro_batch: int, gradients: Tensors) -> Tensors:
        """Run the whole backward pass; returns the gradients of the received tensors.

        ``gradients`` are those of the sent tensors.
        """
        state = self._in_flight.pop(micro_batch)
        outputs, output_gradients = _with_gradients(state.outputs, gradients)
        if outputs:
            torch.autograd.backward(outputs, output_gradients)
        return _input_gradients(state, gradients)

    def backward_inputs(self, micro_batch: int, gradients: Tensors) -> Tensors:
        """Run the half of the backward pass that the previous stage waits for, as ``backward``.

        It is the whole pass if operations share a weight, whose gradients torch does not split.
        """
        state = self._in_flight[micro_batch]
        state.pending = _with_gradients(state.outputs, gradients)
        leaves = [
            state.inputs[name] for name in state.segment.used if state.inputs[name].requires_grad
        ]
        # Without such leaves, all gradients are those of weights, so the whole pass is deferred.
        if leaves and state.pending[0] and state.segment.shares_weights:
            torch.autograd.backward(*state.pending)
            state.pending = ([], [])
        elif leaves and state.pending[0]:
            state.parameter_groups = backward_inputs(*state.pending, leaves, self._weights())
            state.pending = ([], [])
        return _input_gradients(state, gradients)

    def backward_weights(self, micro_batch: int) -> None:
        """Run the half of the backward pass that computes the gradients of the weights."""
        state = self._in_flight.pop(micro_batch)
        if state.parameter_groups is not None:
            backward_weights(self._weights(), state.parameter_groups)
        elif state.pending[0]:
            torch.autograd.backward(*state.pending)

    def forget(self, micro_batch: int) -> None:
        """Drop what the backward pass of a micro-batch needs, because none follows."""
        self._in_flight.pop(micro_batch, None)

    def _weights(self) -> Iterator[torch.nn.Parameter]:
        return iter([p for p in self.parameters if p.requires_grad])


def _as_leaf(value: torch.Tensor) -> torch.Tensor:
    leaf = value.detach()
    return leaf.requires_grad_(can_have_gradient(leaf.dtype))


def _with_gradients(
    outputs: Tensors, gradients: Tensors
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Outputs that require a gradient, and these gradients; None for the loss, whose is 1."""
    names = [name for name, value in outputs.items() if value.requires_grad]
    return [outputs[name] for name in names], [gradients.get(name) for name in names]


def _input_gradients(state: _InFlight, gradients: Tensors) -> Tensors:
    """Gradients of the received tensors, including those from later stages they were passed to."""
    result: Tensors = {}
    for name, leaf in state.inputs.items():
        if not leaf.requires_grad:
            continue
        later = gradients.get(name) if name in state.segment.sent else None
        parts = [part for part in (leaf.grad, later) if part is not None]
        if len(parts) == 2:
            result[name] = parts[0] + parts[1]
        else:
            result[name] = parts[0] if parts else torch.zeros_like(leaf)
    return result
