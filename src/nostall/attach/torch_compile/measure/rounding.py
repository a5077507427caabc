"""Errors of a result in units of the rounding error of its dtype, and the rule that judges them.

The unit of an element is the dtype's epsilon times the element, or times the RMS of the tensor if
that is larger: a sum of large numbers that cancel is not exact to its own size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nostall.attach.torch_compile.measure.reference import rounding_of_sums

MAX_ELEMENT_FACTOR = 4.0
"""Factor by which the worst element may be further off than that of the other version. The largest
of many random errors differs by that much from run to run."""
MAX_RMS_FACTOR = 2.0
"""The same for the RMS of all errors, which differs less."""
MAX_FLIPPED_SHARE = 2.0**-11
"""Share of the elements of integers and bools that may always differ from the reference: those of
which the value before rounding or a comparison is as close to the limit as fp16 can tell."""


@dataclass(frozen=True)
class Errors:
    """Errors of a tensor against a reference."""

    # In units, of the worst element and of all; for integers the count of wrong elements.
    worst: float
    rms: float
    # Position of the worst element.
    at: tuple[int, ...] = ()


def errors(reference: Tensor, value: Tensor) -> Errors:
    """The errors of a value; an element that is wrongly NaN or infinite has an infinite error."""
    if not value.numel():
        return Errors(0.0, 0.0)
    if not value.dtype.is_floating_point:
        wrong = reference.to(value.dtype) != value
        return Errors(float(wrong.sum()), float(wrong.double().mean()))
    exact, found = reference.detach().double(), value.detach().double()
    stored = exact.to(value.dtype).double()
    # A value that overflows in its dtype, or nearly, may be infinite or finite.
    limit = 0.99 * torch.finfo(value.dtype).max
    is_same = (stored == found) | (stored.isnan() & found.isnan())
    is_same |= (exact.abs() >= limit) & (found.abs() >= limit) & (exact.sign() == found.sign())
    gap = torch.where(is_same, 0.0, (found - exact).abs())
    gap = torch.where(gap.isfinite(), gap, math.inf)
    finite = torch.where(exact.isfinite(), exact, 0.0)
    rms = finite.square().mean().sqrt()
    unit = torch.finfo(value.dtype).eps * finite.abs().clamp(min=float(rms))
    units = gap / unit.clamp(min=torch.finfo(value.dtype).tiny)
    place = int(units.argmax())
    at = tuple(int(x) for x in torch.unravel_index(torch.tensor(place), value.shape))
    return Errors(float(units.flatten()[place]), float(units.square().mean().sqrt()), at)


def excess(value: Tensor, tested: Errors, known: Errors, terms: int) -> str:
    """What is wrong with a tensor whose errors are ``tested``; empty if it is accurate enough.

    It is if its errors are not larger than those of the other version (``known``) by more than the
    stated factors, or if rounding explains them. ``terms``: the longest sum of the program.
    """
    if not value.dtype.is_floating_point:
        allowed = MAX_ELEMENT_FACTOR * max(known.worst, MAX_FLIPPED_SHARE * value.numel())
        if tested.worst <= allowed:
            return ""
        return f"{tested.worst:.0f} elements differ from the reference; {allowed:.0f} may"
    rounding = rounding_of_sums(value.dtype, terms)
    worst = MAX_ELEMENT_FACTOR * max(known.worst, rounding)
    rms = MAX_RMS_FACTOR * max(known.rms, rounding)
    if not tested.worst <= worst:
        return (
            f"element {tested.at} is off by {tested.worst:.3g} rounding errors; {worst:.3g} are "
            f"allowed, {MAX_ELEMENT_FACTOR:g} times what Inductor's version or rounding is off by"
        )
    if not tested.rms <= rms:
        return (
            f"a result is off by {tested.rms:.3g} rounding errors (RMS); {rms:.3g} are allowed, "
            f"{MAX_RMS_FACTOR:g} times what Inductor's version or rounding is off by"
        )
    return ""


def has_same_axes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have one shape and dtype, and axes in the same order in memory.

    Inductor pads strides where it expects a gain, so equal layouts may have other strides.
    """
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return a.stride() == b.stride() or _axis_order(a) == _axis_order(b) is not None


def _axis_order(x: Tensor) -> tuple[int, ...] | None:
    """The axes of more than one element, slowest first; None if elements share memory."""
    axes = sorted((a for a in range(x.dim()) if x.shape[a] > 1), key=lambda a: -x.stride(a))
    extent = 1
    for axis in reversed(axes):
        if x.stride(axis) < extent:
            return None
        extent = x.stride(axis) * x.shape[axis]
    return tuple(axes)
