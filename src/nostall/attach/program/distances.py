"""Whether the results of a changed version are those of the original but for roundings."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

SMALL, SUMMED = 1e-5, 128
"""Roundings of a sum in float32: eager mode sums batch statistics in float64 on CPUs, Inductor does
not.  The bound is 1.5e-5, a thirtieth of TF32's rounding; narrower types are summed in float32."""
NOISE, NOISE_ROOM = 0.05, 8
"""Share of a result's norm that one rounding moves, from which its terms cancel: the gradient of a
bias before a batch norm is 0 but for their roundings.  Its room is then in the mean norm of all
results (760 roundings of it were seen with channels_last, CPU, where 1024 are allowed)."""


class Outcome(NamedTuple):
    """Results of one run of a module's forward and backward pass."""

    form: Any
    """Types, shapes and devices of the outputs, and which gradients there are."""
    values: list[Any]
    """Outputs, gradients and buffers."""
    outputs: list[Any]
    """The outputs themselves."""
    drew: bool
    """Whether the run drew random numbers."""


def compare(
    original: Outcome, changed: Outcome, moved: Sequence[Outcome], eps: float
) -> tuple[str, float]:
    """How a result is out of the band (empty if none is); the largest share of what is allowed.

    Elements that neither the version nor one rounding moves, such as large negative numbers in the
    place of masked scores, add nothing to the norm of a result, which would allow any distance.
    """
    checked = original.outputs or original.values
    if any(v.numel() for v in checked) and not any(bool(v.isfinite().any()) for v in checked):
        return "the original's results are all NaN or infinite, with which nothing is proven", 0.0
    found = []
    for at, (a, b) in enumerate(zip(original.values, changed.values, strict=True)):
        b = b.to(a.device)
        if not is_float(a):
            if not bool((a == b).all()):
                return f"result {at}, whole numbers of shape {tuple(a.shape)}, differs", 0.0
            continue
        if not _same_special(a, b):
            return f"result {at} of shape {tuple(a.shape)} has other NaN or infinities", 0.0
        found.append((at, *_distances(a, b, [m.values[at].to(a) for m in moved])))
    pooled = sum(size for _, _, _, size, _ in found)
    floor = SUMMED * eps if eps < SMALL else 4 * eps
    largest = 0.0
    for at, shape, distance, size, band in found:
        cancelled = NOISE_ROOM * floor if band > NOISE * size else eps
        allowed = 2 * band + floor * size + cancelled * pooled / len(original.values)
        if distance > allowed:
            return (
                f"result {at} of shape {shape} is off by {distance / (size or 1):.1e} of "
                f"its norm; one rounding of parameters moves it by {band / (size or 1):.1e}"
            ), 0.0
        largest = max(largest, distance / (allowed or 1.0))
    return "", largest


def _distances(a: Any, b: Any, moved: Sequence[Any]) -> tuple[tuple[int, ...], float, float, float]:
    """Shape of a result; how far the version's is off, its own norm, how far roundings move it."""
    torch = sys.modules["torch"]
    is_finite = a.isfinite()
    a, b = finite(a), finite(b)
    fixed = a == b
    band = 0.0
    for m in moved:
        m = torch.where(is_finite & m.isfinite(), m, a)
        fixed &= m == a
        band = max(band, norm(a - m))
    return tuple(a.shape), norm(a - b), norm(a.masked_fill(fixed, 0.0)), band


def is_float(tensor: Any) -> bool:
    return bool(tensor.is_floating_point())


def _same_special(one: Any, other: Any) -> bool:
    """Whether NaN and infinities are at the same places."""
    torch = sys.modules["torch"]
    kinds = (torch.isnan, torch.isposinf, torch.isneginf) if is_float(one) else ()
    return all(torch.equal(kind(one), kind(other)) for kind in kinds)


def is_equal(one: Any, other: Any) -> bool:
    """Whether two tensors have equal elements; NaN is equal to NaN."""
    return _same_special(one, other) and sys.modules["torch"].equal(finite(one), finite(other))


def finite(tensor: Any) -> Any:
    """``tensor`` with zeros in place of NaN and infinities."""
    return tensor.nan_to_num(0.0, 0.0, 0.0) if is_float(tensor) else tensor


def norm(tensor: Any) -> float:
    torch = sys.modules["torch"]
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))
