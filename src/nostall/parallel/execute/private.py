"""The one place that uses underscore-private parts of ``torch.distributed.pipelining``.

Run with torch 2.11 (on GPUs) and 2.13 (on processors); what another version lacks is refused by
name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, reduce
from importlib import import_module
from typing import Any

import torch

from nostall.core.errors import MissingPart

Groups = list[dict[str, Any]]
_PACKAGE = "torch.distributed.pipelining"
_STAGE = "stage.PipelineStage"
_RUNTIME = "schedules._PipelineScheduleRuntime"
_PARTS: Mapping[str, tuple[str, ...]] = {
    _STAGE: ("input_args", "output_args", "group"),
    _RUNTIME: (),
    # Whose constructor the runtime's hands its arguments to.
    "schedules.PipelineScheduleMulti": ("n_microbatches", "loss_fn", "scale_grads"),
    f"{_RUNTIME}.step": ("target", "losses", "return_outputs"),
    f"{_RUNTIME}._prepare_schedule_with_comms": (),
    "schedules._Action.from_str": (),
    "_backward.stage_backward_input": (),
    "_backward.stage_backward_weight": (),
}
"""What is used, and the arguments that are given by name."""


@cache  # asked at every split backward pass
def lacking() -> str:
    """The first part that the installed torch does not have; '' when all are there."""
    for path, arguments in _PARTS.items():
        try:
            known = inspect.signature(_part(path)).parameters
        except (ImportError, AttributeError):
            return f"{_PACKAGE}.{path}"
        if absent := [name for name in arguments if name not in known]:
            return f"{_PACKAGE}.{path}({absent[0]}=)"
    return ""


def require() -> None:
    """Raise :class:`MissingPart` where the installed torch lacks a part."""
    if part := lacking():
        raise MissingPart(
            f"torch {torch.__version__} has no {part}; versions that are known to have it are 2.11 "
            "to 2.13; install one of them, or run with --engine p2p and an order other than "
            "zero-bubble"
        )


@cache
def _part(path: str) -> Any:
    module, _, rest = path.partition(".")
    return reduce(getattr, rest.split("."), import_module(f"{_PACKAGE}.{module}"))


def backward_of_inputs(
    ends: Sequence[torch.Tensor],
    seeds: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor],
    weights: Iterator[torch.nn.Parameter],
) -> Groups:
    """Gradients of ``inputs`` alone, into their ``.grad``; what the weights still need is kept.

    ``seeds`` are the gradients of ``ends``, or None for a loss.
    """
    require()
    given = None if any(seed is None for seed in seeds) else list(seeds)
    groups: Groups
    _, groups = _part("_backward.stage_backward_input")(list(ends), given, list(inputs), weights)
    return groups


def backward_of_weights(weights: Iterator[torch.nn.Parameter], groups: Groups) -> None:
    """The rest of :func:`backward_of_inputs`: gradients of the weights, into their ``.grad``."""
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
    """A stage whose tensors are known beforehand, so that nothing is tried out to learn them."""
    make = _part(_STAGE)
    more: dict[str, Any] = {}
    if "input_grads" in inspect.signature(make).parameters:  # from 2.13
        more = {
            "input_grads": tuple(torch.empty_like(t) for t in received),
            "output_grads": tuple(torch.empty_like(t) for t in sent),
        }
    return make(
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
    stages: Sequence[Any],
    micro_batches: int,
    loss: Callable[[Any, Any], torch.Tensor],
    rows: Mapping[int, Sequence[str]],
) -> Any:
    """A schedule from each rank's row of actions (``0F3``, ``1B2``, ``2I0``, ``2W0``)."""
    made = _part(_RUNTIME)(
        list(stages), n_microbatches=micro_batches, loss_fn=loss, scale_grads=False
    )
    action = _part("schedules._Action.from_str")
    actions = {rank: [action(cell) for cell in row] for rank, row in rows.items()}
    made._prepare_schedule_with_comms(actions)
    return made
