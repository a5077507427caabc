"""A stage of a pipeline as a training job of its own, so that it can be captured and sharded.

The tensors that a stage receives become parameters, whose gradients are sent back.  Its loss is the
sum of the products of the tensors that it sends with their gradients, which are inputs; the last
stage has the loss of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from nostall.parallel.module.job import Job
from nostall.parallel.module.model import Model
from nostall.parallel.module.segment import Segment
from nostall.parallel.sharding.graph import ShardingGraph

_DEVICE = torch.device("cpu")
RECEIVED = "received_"
"""Prefix of the parameters that are tensors of the stage before."""


class _StageModule(nn.Module):  # type: ignore[misc]
    """Maps leaves of the batch and gradients of the sent tensors to a scalar."""

    def __init__(self, segment: Segment, example: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.segment = [segment]  # a list hides the function's own module
        for number, tensor in enumerate(segment.own):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(f"own_{number}", tensor)
            else:
                self.register_buffer(f"own_{number}", tensor)
        for name, value in example.items():
            if value.is_floating_point():
                self.register_parameter(f"{RECEIVED}{name}", nn.Parameter(value))
            else:
                self.register_buffer(f"{RECEIVED}{name}", value)

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        (segment,) = self.segment
        own = [getattr(self, f"own_{i}") for i in range(len(segment.own))]
        leaves = given[: len(segment.leaves)]
        received = [getattr(self, f"{RECEIVED}{name}") for name in segment.used]
        outputs = segment.function(*own, *leaves, *received)
        if segment.computed == ("loss",):
            return outputs[0]
        gradients = given[len(segment.leaves) :]
        products = [
            (output * gradient).sum() for output, gradient in zip(outputs, gradients, strict=True)
        ]
        return torch.stack(products).sum() if len(products) > 1 else products[0]


@dataclass(frozen=True, eq=False)
class StageJob:
    """The job of layers ``first`` to ``end`` (exclusive) for one micro-batch."""

    first: int
    end: int
    segment: Segment
    job: Job
    names: dict[str, str]
    """Names of the model's parameters by those of the stage."""
    batched: tuple[bool, ...]
    """For each leaf of the batch that the stage reads, whether it has an entry for each sample."""

    @property
    def given_bytes(self) -> int:
        """Bytes of the received tensors and of the leaves of the batch, of one micro-batch."""
        received = [getattr(self.job.module, f"{RECEIVED}{name}") for name in self.segment.used]
        leaves = tree_leaves(self.job.inputs)[: len(self.segment.leaves)]
        return sum(tensor.numel() * tensor.element_size() for tensor in (*received, *leaves))


def stage_job(model: Model, first: int, end: int, samples: int) -> StageJob:
    """The job of a stage; tensors are zeros of the right shape.

    Raises :class:`BadModel` if the stage passes a tensor on that it does not compute, such as an
    encoder's result that later stages read.
    """
    from nostall.parallel.errors import BadModel

    segment = model.segment(first, end, samples, _DEVICE)
    is_last = end == len(model)
    if not is_last and set(segment.computed) != set(segment.sent):
        passed = sorted(set(segment.sent) - set(segment.computed))
        raise BadModel(
            f"layers {first} to {end - 1} pass {', '.join(passed[:3])} on to later layers; hybrid "
            "plans need stages that send only what they compute; use a pipeline planner or "
            "--planner sharding"
        )
    batch = tree_leaves(model.job.example_batch(samples))
    received = {name: _zeros(model, name, samples) for name in segment.used}
    sent = () if is_last else segment.computed
    inputs = [batch[i] for i in segment.leaves] + [_zeros(model, name, samples) for name in sent]
    by_tensor = {id(p): name for name, p in model.job.module.named_parameters()}
    names = {
        f"own_{number}": by_tensor[id(tensor)]
        for number, tensor in enumerate(segment.own)
        if id(tensor) in by_tensor
    }
    job = Job(_StageModule(segment, received), tuple(inputs), torch.zeros(samples), _itself)
    batched = tuple(model.job.batched_leaves[i] for i in segment.leaves)
    return StageJob(first, end, segment, job, names, batched)


def sent_tensors(graph: ShardingGraph, leaves: int, names: Sequence[str]) -> dict[str, int]:
    """Numbers of the tensors that a stage sends: those multiplied with their gradients.

    ``leaves`` is the number of tensors of the batch that the stage reads.
    """
    found = {}
    for place, name in enumerate(names):
        target = f"batch {leaves + place}"
        given = {o.outputs[0] for o in graph.operators if o.target == target}
        for operator in graph.operators:  # a branch returns its input
            if operator.kind == "branch" and set(operator.inputs) <= given:
                given.update(operator.outputs)
        product = next(o for o in graph.operators if o.is_forward
                       and o.kind == "operation" and given & set(o.inputs))  # fmt: skip
        (found[name],) = (t for t in product.inputs if t not in given)
    return found


def _zeros(model: Model, name: str, samples: int) -> torch.Tensor:
    return torch.zeros(model.shape(name, samples), dtype=model.dtype(name))


def _itself(loss: torch.Tensor, _: Any) -> torch.Tensor:
    return loss
