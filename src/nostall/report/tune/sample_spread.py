"""What the last comparison measured, as one inline SVG: all samples, and the intervals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nostall.report.tune.run_data import LoadedRun
from nostall.report.units import Scale, ticks

WIDTH, HEIGHT = 1280, 330
LEFT, RIGHT = 224, 24
TOP, ROW = 10, 52
LINE = 30
SHOWN = (0.5, 99.5)
"""Percentiles between which samples are drawn; how many lie outside is said."""
_STEPS = 96

Samples = tuple[float, ...]


class _Samples(BaseModel):
    original: Samples = Field(min_length=2)
    candidate: Samples = Field(min_length=2)
    null: Samples = Field(min_length=2)


class Compared(BaseModel):
    """The comparison as ``nostall tune`` recorded it; samples in seconds."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    verdict: str
    ratio: float = Field(gt=0)
    low: float = Field(gt=0)
    high: float = Field(gt=0)
    null_low: float = Field(gt=0)
    null_high: float = Field(gt=0)
    checks: int | None = None
    equal: str = "bit by bit"
    samples: _Samples

    @property
    def rows(self) -> tuple[tuple[str, Samples], ...]:
        """Name and samples, from the top."""
        given = self.samples
        return (("original", given.original), ("candidate", given.candidate), ("null", given.null))


def compared(run: LoadedRun) -> tuple[Compared | None, str]:
    """The recorded comparison, or None and why there is none (empty for a modelled run)."""
    entry = run.result.get("comparison")
    if not isinstance(entry, Mapping):
        return None, ""
    if "samples" not in entry:
        return None, f"{entry.get('fate', 'no answer')}: {entry.get('detail', 'nothing was timed')}"
    try:
        return Compared.model_validate(entry), ""
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return None, f"the recorded samples cannot be used ({where}: {first['msg']})"


def spread(found: Compared) -> Markup:
    """Violins of original, candidate and null over time, and both ratios with their intervals."""
    scale = Scale("s", float(np.median(found.samples.original)))
    parts = [
        f'<svg class="spread" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="measured '
        'samples of original, candidate and null, and intervals of both ratios">',
        *_violins(found, scale),
        *_intervals(found),
        "</svg>",
    ]
    return Markup("".join(parts))


class _Axis:
    """Maps values to the drawing's width."""

    def __init__(self, low: float, high: float) -> None:
        room = 0.03 * (high - low) or 0.001 * abs(high) or 1.0
        self.low, self.high = low - room, high + room

    def x(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def ticks(self, y: float, top: float, factor: float, unit: str) -> Iterator[str]:
        for tick in ticks(self.low * factor, self.high * factor, 8):
            x = self.x(tick / factor)
            yield f'<path class="grid" d="M{x} {top}V{y}"/>'
            yield f'<text x="{x}" y="{y + 16}" text-anchor="middle">{tick:.6g}</text>'
        yield f'<text class="axis" x="{LEFT - 12}" y="{y + 16}" text-anchor="end">{unit}</text>'


def _violins(found: Compared, scale: Scale) -> Iterator[str]:
    pooled = np.concatenate([np.asarray(values) for _, values in found.rows])
    low, high = np.percentile(pooled, SHOWN)
    axis = _Axis(float(low), float(high))
    bottom = TOP + ROW * len(found.rows)
    yield from axis.ticks(bottom, TOP, scale.factor, f"measured {scale.unit}")
    for number, (name, values) in enumerate(found.rows):
        middle = TOP + ROW * number + ROW / 2
        shown = np.asarray([v for v in values if axis.low <= v <= axis.high])
        beyond = len(values) - len(shown)
        said = f"{scale(float(np.median(values)))}, n = {len(values)}"
        said += f" ({beyond} outside)" if beyond else ""
        yield _label(name, said, middle)
        if len(shown) > 1:
            yield f'<path class="violin {name}" d="{_violin(shown, axis, middle)}"/>'
        lower, median, upper = np.percentile(values, (25, 50, 75))
        yield f'<path class="middle" d="M{axis.x(lower)} {middle}H{axis.x(upper)}"/>'
        yield f'<path class="median" d="M{axis.x(median)} {middle - 9}v18"/>'


def _violin(values: NDArray[np.float64], axis: _Axis, middle: float) -> str:
    """Outline of a Gaussian density estimate with Silverman's bandwidth."""
    spread = min(float(values.std()), float(np.subtract(*np.percentile(values, (75, 25)))) / 1.349)
    width = 0.9 * (spread or float(values.std())) * len(values) ** -0.2
    # Equal samples have no width: a sliver stands for them.
    width = width or 0.002 * (axis.high - axis.low)
    at = np.linspace(
        max(axis.low, values.min() - 2 * width), min(axis.high, values.max() + 2 * width), _STEPS
    )
    density = np.exp(-0.5 * ((at[:, None] - values[None, :]) / width) ** 2).sum(axis=1)
    half = density / density.max() * (ROW / 2 - 4)
    upper = [f"{axis.x(x)} {middle - h:.1f}" for x, h in zip(at, half, strict=True)]
    lower = [f"{axis.x(x)} {middle + h:.1f}" for x, h in zip(at, half, strict=True)][::-1]
    return f"M{'L'.join([*upper, *lower])}Z"


def _intervals(found: Compared) -> Iterator[str]:
    rows = (
        ("candidate", found.low, found.ratio, found.high),
        ("null", found.null_low, None, found.null_high),
    )
    axis = _Axis(min(1.0, found.low, found.null_low), max(1.0, found.high, found.null_high))
    top = TOP + ROW * len(found.rows) + 50
    bottom = top + LINE * len(rows)
    yield from axis.ticks(bottom, top, 1.0, "original / this")
    yield f'<path class="one" d="M{axis.x(1.0)} {top - 6}V{bottom}"/>'
    for number, (name, low, value, high) in enumerate(rows):
        y = top + LINE * number + LINE / 2
        yield _label(name, f"{low:.4f} to {high:.4f}", y)
        ends: Sequence[float] = (axis.x(low), axis.x(high))
        yield f'<path class="interval {name}" d="M{ends[0]} {y}H{ends[1]}"/>'
        yield "".join(f'<path class="interval {name}" d="M{x} {y - 5}v10"/>' for x in ends)
        if value is not None:
            yield f'<path class="median" d="M{axis.x(value)} {y - 9}v18"/>'


def _label(name: str, said: str, y: float) -> str:
    x = LEFT - 12
    return (
        f'<text class="axis" x="{x}" y="{y - 2}" text-anchor="end">{name}</text>'
        f'<text x="{x}" y="{y + 13}" text-anchor="end">{said}</text>'
    )
