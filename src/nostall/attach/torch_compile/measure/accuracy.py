"""Whether two versions of a graph compute the same: results and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nostall.attach.torch_compile.measure.call import Call

Version = Callable[..., Any]

LEAST_ALLOWED, ROUNDINGS = 1e-4, 8.0
"""Relative difference that is allowed: roundings of the dtype, and what fp32 sums may lose."""
FEW_ROUNDINGS = 0.5
"""Of a dtype of one byte, which rounds what was computed in a wider one: some elements round the
other way.  Eight such roundings would be all of a number."""
ELEMENT = 4.0
"""How much further one element may be off, relative to itself or to the typical one, where that is
more: a single wrong one disappears in the norm of the whole."""
LEAST_SHARE = 0.1
"""Of the largest gradient: smaller ones are held to the same absolute difference."""
NUDGES = 3.0
"""Gradients as small as that may be off by so many times as much as Inductor's own ones move where
inputs move by a rounding: the sum of what cancels is nothing but roundings."""


class Differs(Exception):
    """The stitched version does not compute what the plain one does."""


@dataclass(frozen=True)
class _Results:
    """Of one run: what it gave, and the gradients for ``seeds`` behind what it gave."""

    given: list[Tensor]
    gradients: list[Tensor | None]
    seeds: list[Tensor]


def run_version(
    version: Version, args: Sequence[Any], seeds: list[Tensor] | None = None
) -> _Results:
    """One forward pass, and the backward pass where there is one, from random ``seeds`` unless
    some are given: from equal ones the gradients of softmax and norms are nothing but noise."""
    # With CUDA graphs inside, Inductor has to know that what was given out may go.
    if torch.cuda.is_available():
        torch.compiler.cudagraph_mark_step_begin()
    result = version(*args)
    values = result if isinstance(result, (tuple, list)) else (result,)
    given = [x for x in values if isinstance(x, Tensor)]
    ends = [x for x in given if x.grad_fn is not None]
    leaves = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
    gradients: list[Tensor | None] = []
    if seeds and not ends:
        raise Differs("no result has a gradient")
    if ends and leaves:
        seeds = [torch.randn_like(x) for x in ends] if seeds is None else seeds
        if [x.shape for x in seeds] != [x.shape for x in ends]:
            raise Differs("other results have gradients than in Inductor's version")
        gradients = list(torch.autograd.grad(ends, leaves, seeds, allow_unused=True))
    return _Results(given, gradients, seeds or [])


def largest_difference(plain: Version, stitched: Version, call: Call, seeds: list[Tensor]) -> float:
    """The largest relative difference of any result or gradient, as norms.

    Both versions round in other places; what is allowed is a few roundings of the result's dtype.
    Gradients that are nearly nothing beside the others (those of a bias in front of a norm are 0
    but for rounding) may be off by as much as larger ones.
    """
    before, copies = call.fresh(), call.fresh()
    state = _random_state(call)
    first = run_version(plain, before, seeds or None)
    wanted, gradients = _copied(first.given), _copied(first.gradients)
    _random_state(call, state)
    found = run_version(stitched, copies, seeds or None)
    wanted += [before[at] for at in sorted(call.changed)]
    given = [*found.given, *(copies[at] for at in sorted(call.changed))]
    worst = max((_distance(a, b, 0.0) for a, b in zip(wanted, given, strict=True)), default=0.0)
    floor = LEAST_SHARE * max((_size(x) for x in gradients if x is not None), default=0.0)
    moved: list[float] | None = None
    for at, (one, other) in enumerate(zip(gradients, found.gradients, strict=True)):
        try:
            worst = max(worst, _distance(one, other, floor))
        except Differs:
            if one is None or other is None or max(_size(one), _size(other)) > floor:
                raise
            if moved is None:
                _random_state(call, state)
                moved = _moved(plain, call, seeds, gradients)
            worst = max(worst, _distance(one, other, NUDGES * moved[at] / _allowed(one.dtype)))
    return worst


def _moved(
    plain: Version, call: Call, seeds: list[Tensor], gradients: Sequence[Tensor | None]
) -> list[float]:
    """How far the gradients move where all but parameters moves by about one rounding: inputs, and
    what comes from behind."""
    state, args = _random_state(call), call.fresh()
    for place, value in enumerate(args):
        kept = not isinstance(value, Tensor) or isinstance(call.args[place], torch.nn.Parameter)
        if not kept and value.is_floating_point():
            args[place] = _nudged(value).requires_grad_(value.requires_grad)
    behind = [_nudged(seed) for seed in seeds]
    _random_state(call, state)
    found = run_version(plain, args, behind or None).gradients
    return [
        0.0 if one is None or other is None else _size(one.double() - other.double())
        for one, other in zip(gradients, found, strict=True)
    ]


def _nudged(x: Tensor) -> Tensor:
    step = torch.finfo(x.dtype).eps * (2 * torch.rand_like(x) - 1)
    return (x.detach().double() * (1 + step.double())).to(x.dtype)


def _allowed(dtype: torch.dtype) -> float:
    """Relative difference of results of this dtype."""
    roundings = ROUNDINGS if dtype.itemsize > 1 else FEW_ROUNDINGS
    return max(LEAST_ALLOWED, roundings * float(torch.finfo(dtype).eps))


def _distance(one: Tensor | None, other: Tensor | None, floor: float) -> float:
    """How far two results are apart, relative to the first or to ``floor``, where that is more.
    Raises :class:`Differs` where that is more than rounding explains."""
    if one is None or other is None:
        if one is not None or other is not None:
            raise Differs("a gradient is missing")
        return 0.0
    one, other = one.detach(), other.detach()
    if (one.shape, one.stride(), one.dtype) != (other.shape, other.stride(), other.dtype):
        raise Differs(f"a result has {_about(other)}; Inductor's has {_about(one)}")
    if not one.dtype.is_floating_point:
        error, element, allowed = float((one != other).double().sum()), 0.0, 0.0
    else:
        allowed = _allowed(one.dtype)
        error, element = _errors(one.double(), other.double(), floor)
    if not error <= allowed:
        raise Differs(f"a result is off by {error:.3g} of its size; {allowed:.3g} is allowed")
    if not element <= ELEMENT * allowed:
        what = f"{element:.3g} of its size or the typical one"
        raise Differs(f"an element is off by {what}; {ELEMENT * allowed:.3g} is allowed")
    return error


def _errors(x: Tensor, y: Tensor, floor: float) -> tuple[float, float]:
    """(of the whole, of the worst element), relative."""
    # Where both are NaN or the same infinity they agree.
    same = (x == y) | (x.isnan() & y.isnan())
    gap = torch.where(same, 0.0, x - y)
    if not bool(gap.isfinite().all()):
        return math.inf, math.inf
    scale = max(_size(x), floor, torch.finfo(torch.float32).tiny)
    elements = gap.abs() / x.abs().nan_to_num(0.0).clamp(min=scale)
    return _size(gap) / scale, float(elements.max()) if elements.numel() else 0.0


def _size(x: Tensor) -> float:
    """The root of the mean square of what is finite."""
    if not x.dtype.is_floating_point or not x.numel():
        return 0.0
    wide = x.detach().double()
    return float(torch.where(wide.isfinite(), wide, 0.0).square().mean().sqrt())


def _copied(values: Sequence[Tensor | None]) -> list[Tensor | None]:
    # With CUDA graphs the next run writes to the same memory.
    return [None if x is None else x.detach().clone() for x in values]


def _about(x: Tensor) -> str:
    return f"shape {tuple(x.shape)}, strides {x.stride()}, {x.dtype}"


def _random_state(call: Call, state: Any = None) -> Any:
    """Read the random generators' states, or set them again."""
    devices = sorted({x.device.index for x in call.args if isinstance(x, Tensor) and x.is_cuda})
    if state is None:
        return torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in devices]
    torch.set_rng_state(state[0])
    for device, one in zip(devices, state[1], strict=True):
        torch.cuda.set_rng_state(one, device)
    return state
