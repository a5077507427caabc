"""Adapter to the underscore-private parts of ``torch.distributed.pipelining`` that nostall uses.

No other module of nostall uses these parts.  Tested with torch 2.11 (on GPUs) and 2.13 (on CPUs);
if another version lacks a part, the error names it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, reduce
from importlib import import_module
from typing import Any

import torch

from nostall.core.errors import MissingPart

ParameterGroups = list[dict[str, Any]]
"""State that torch keeps between the two halves of a split backward pass."""
_PACKAGE = "torch.distributed.pipelining"
_STAGE = "stage.PipelineStage"
_RUNTIME = "schedules._PipelineScheduleRuntime"
_PARTS: Mapping[str, tuple[str, ...]] = {
    _STAGE: ("input_args", "output_args", "group"),
    _RUNTIME: (),
    # The constructor of the runtime passes its arguments on to this class.
    "schedules.PipelineScheduleMulti": ("n_microbatches", "loss_fn", "scale_grads"),
    f"{_RUNTIME}.step": ("target", "losses", "return_outputs"),
    f"{_RUNTIME}._prepare_schedule_with_comms": (),
    "schedules._Action.from_str": (),
    "_backward.stage_backward_input": (),
    "_backward.stage_backward_weight": (),
}
"""The parts in use, and the arguments that are passed to them by name."""


@cache  # called for each split backward pass
def missing_part() -> str:
    """The first part in use that the installed torch lacks; empty if it has all."""
    for path, arguments in _PARTS.items():
        try:
            parameters = inspect.signature(_part(path)).parameters
        except (ImportError, AttributeError):
            return f"{_PACKAGE}.{path}"
        if missing := [name for name in arguments if name not in parameters]:
            return f"{_PACKAGE}.{path}({missing[0]}=)"
    return ""


def require_parts() -> None:
    """Raise :class:`MissingPart` if the installed torch lacks a part."""
    if part := missing_part():
        raise MissingPart(
            f"torch {torch.__version__} has no {part}; versions that are known to have it are 2.11 "
            "to 2.13; install one of them, or run with --engine p2p and an order other than "
            "zero-bubble"
        )


@cache
def _part(path: str) -> Any:
    module, _, rest = path.partition(".")
    return reduce(getattr, rest.split("."), import_module(f"{_PACKAGE}.{module}"))


def backward_inputs(
    outputs: Sequence[torch.Tensor],
    output_gradients: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
    weights: Iterator[torch.nn.Parameter],
) -> ParameterGroups:
    """Compute the gradients of ``inputs`` into their ``.grad``, without those of the weights.

    An entry of ``output_gradients`` is None if the output is the loss.  Returns what
    :func:`backward_weights` needs.
    """
    require_parts()
    has_loss = any(gradient is None for gradient in output_gradients)
    gradients = None if has_loss else list(output_gradients)
    groups: ParameterGroups
    backward = _part("_backward.stage_backward_input")
    _, groups = backward(list(outputs), gradients, list(inputs), weights)
    return groups


def backward_weights(weights: Iterator[torch.nn.Parameter], groups: ParameterGroups) -> None:
    """Compute the gradients of the weights into their ``.grad``, after :func:`backward_inputs`."""
    _part("_backward.stage_backward_weight")(weights, groups)


def make_stage(
    module: torch.nn.Module,
    number: int,
    stages: int,
    device: torch.device,
    group: Any,
    received: Sequence[torch.Tensor],
    sent: Sequence[torch.Tensor],
) -> Any:
    """A ``PipelineStage`` with given shapes, so torch runs no forward pass to infer them.

    ``received`` and ``sent`` are examples of the tensors that the stage exchanges.
    """
    stage_class = _part(_STAGE)
    gradients: dict[str, Any] = {}
    if "input_grads" in inspect.signature(stage_class).parameters:  # since torch 2.13
        gradients = {
            "input_grads": tuple(torch.empty_like(t) for t in received),
            "output_grads": tuple(torch.empty_like(t) for t in sent),
        }
    return stage_class(
        module,
        number,
        stages,
        device,
        input_args=tuple(received),
        output_args=tuple(sent),
        group=group,
        **gradients,
    )


def make_schedule(
    stages: Sequence[Any],
    micro_batches: int,
    loss: Callable[[Any, Any], torch.Tensor],
    rows: Mapping[int, Sequence[str]],
) -> Any:
    """A pipeline schedule from the actions of each rank (``0F3``, ``1B2``, ``2I0``, ``2W0``)."""
    schedule = _part(_RUNTIME)(
        list(stages), n_microbatches=micro_batches, loss_fn=loss, scale_grads=False
    )
    parse = _part("schedules._Action.from_str")
    actions = {rank: [parse(cell) for cell in row] for rank, row in rows.items()}
    schedule._prepare_schedule_with_comms(actions)
    return schedule
