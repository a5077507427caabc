"""The one place that uses underscore-private parts of ``torch.distributed.pipelining``.

Tried with torch 2.11 and 2.13, on processors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

Groups = list[dict[str, Any]]


def backward_of_inputs(
    ends: Sequence[torch.Tensor],
    seeds: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
    weights: Iterator[torch.nn.Parameter],
) -> Groups:
    """Gradients of ``inputs`` alone, into their ``.grad``; what the weights still need is kept.

    ``seeds`` are the gradients of ``ends``, or None for a loss.
    """
    given = None if any(seed is None for seed in seeds) else list(seeds)
    groups: Groups
    _, groups = stage_backward_input(list(ends), given, list(inputs), weights)
    return groups


def backward_of_weights(weights: Iterator[torch.nn.Parameter], groups: Groups) -> None:
    """The rest of :func:`backward_of_inputs`: gradients of the weights, into their ``.grad``."""
    stage_backward_weight(weights, groups)


def make_stage(
    module: torch.nn.Module,
    number: int,
    stages: int,
    device: torch.device,
    group: Any,
    received: Sequence[torch.Tensor],
    sent: Sequence[torch.Tensor],
) -> PipelineStage:
    """A stage whose tensors are known beforehand, so that nothing is tried out to learn them."""
    more: dict[str, Any] = {}
    if "input_grads" in inspect.signature(PipelineStage).parameters:  # from 2.13
        more = {
            "input_grads": tuple(torch.empty_like(t) for t in received),
            "output_grads": tuple(torch.empty_like(t) for t in sent),
        }
    return PipelineStage(
        module,
        number,
        stages,
        device,
        input_args=tuple(received),
        output_args=tuple(sent),
        group=group,
        **more,
    )


def make_schedule(
    stages: Sequence[PipelineStage],
    micro_batches: int,
    loss: Callable[[Any, Any], torch.Tensor],
    rows: Mapping[int, Sequence[str]],
) -> Any:
    """A schedule from each rank's row of actions (``0F3``, ``1B2``, ``2I0``, ``2W0``)."""
    made = schedules._PipelineScheduleRuntime(
        list(stages), micro_batches, loss_fn=loss, scale_grads=False
    )
    actions = {
        rank: [schedules._Action.from_str(cell) for cell in row] for rank, row in rows.items()
    }
    made._prepare_schedule_with_comms(actions)
    return made
