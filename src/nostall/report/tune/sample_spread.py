"""Figure of the final comparison: measured samples and confidence intervals, as an inline SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nostall.core.validation import first_problem
from nostall.report.units import Scale, tick_labels, ticks

# Pixels: the figure, its margins, the height of a violin's row and of an interval's row.
WIDTH, HEIGHT = 1280, 336
LEFT, RIGHT = 224, 24
TOP, VIOLIN_ROW = 10, 52
INTERVAL_ROW = 48
SHOWN_PERCENTILES = (0.5, 99.5)
"""Samples outside of these percentiles of all samples are counted, not drawn."""
_DENSITY_POINTS = 96
"""Points of a violin's outline."""

Samples = tuple[float, ...]


class SampleSets(BaseModel):
    """Seconds per launch, in order of measurement."""

    original: Samples = Field(min_length=2)
    candidate: Samples = Field(min_length=2)
    null: Samples = Field(min_length=2)


class ComparisonRecord(BaseModel):
    """The final comparison in ``run.json``; ratios are original / candidate."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    verdict: str
    ratio: float = Field(gt=0)
    low: float = Field(gt=0)
    high: float = Field(gt=0)
    null_low: float = Field(gt=0)
    null_high: float = Field(gt=0)
    checks: int | None = None
    """Random inputs on which the outputs were compared."""
    equal: str = "bit by bit"
    """Rule by which the outputs were compared."""
    samples: SampleSets

    @property
    def medians(self) -> tuple[float, float]:
        """Median seconds of the original, and of the result that is kept."""
        original = float(np.median(self.samples.original))
        is_kept = self.verdict == "faster"
        return original, float(np.median(self.samples.candidate)) if is_kept else original

    @property
    def interval(self) -> str:
        """The intervals of the ratio and of the null in words."""
        return (
            f"95 % interval {self.low:.4f} to {self.high:.4f}; the original beside itself "
            f"{self.null_low:.4f} to {self.null_high:.4f}"
        )

    @property
    def rows(self) -> tuple[tuple[str, Samples], ...]:
        """Names and samples, from the top of the figure."""
        sets = self.samples
        return (("original", sets.original), ("candidate", sets.candidate), ("null", sets.null))


def load_comparison(result: Mapping[str, Any]) -> tuple[ComparisonRecord | None, str]:
    """The comparison in a run's result, or None and the reason (empty for a modelled run)."""
    record = result.get("comparison")
    if not isinstance(record, Mapping):
        return None, ""
    if "samples" not in record:
        detail = record.get("detail", "nothing was timed")
        return None, f"{record.get('fate', 'no outcome')}: {detail}"
    try:
        return ComparisonRecord.model_validate(record), ""
    except ValidationError as error:
        return None, f"the recorded samples cannot be used ({first_problem(error, '')})"


def draw_samples(comparison: ComparisonRecord) -> Markup:
    """Violins of original, candidate and null over time, and both ratios with their intervals."""
    scale = Scale("s", float(np.median(comparison.samples.original)))
    parts = [
        f'<svg class="spread" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="measured '
        'samples of original, candidate and null, and intervals of both ratios">',
        *_violins(comparison, scale),
        *_intervals(comparison),
        "</svg>",
    ]
    return Markup("".join(parts))


class _Axis:
    """Horizontal axis: maps values to pixels."""

    def __init__(self, low: float, high: float) -> None:
        margin = 0.03 * (high - low) or 0.001 * abs(high) or 1.0
        self.low, self.high = low - margin, high + margin

    def x(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def ticks(self, y: float, top: float, factor: float, unit: str) -> Iterator[str]:
        """Grid lines from ``top`` to ``y`` with labels in ``unit`` (values times ``factor``)."""
        values = ticks(self.low * factor, self.high * factor, 8)
        for tick, label in zip(values, tick_labels(values), strict=True):
            x = self.x(tick / factor)
            yield f'<path class="grid" d="M{x} {top}V{y}"/>'
            yield f'<text x="{x}" y="{y + 16}" text-anchor="middle">{label}</text>'
        yield f'<text class="axis" x="{LEFT - 12}" y="{y + 16}" text-anchor="end">{unit}</text>'


def _violins(comparison: ComparisonRecord, scale: Scale) -> Iterator[str]:
    pooled = np.concatenate([np.asarray(values) for _, values in comparison.rows])
    low, high = np.percentile(pooled, SHOWN_PERCENTILES)
    axis = _Axis(float(low), float(high))
    bottom = TOP + VIOLIN_ROW * len(comparison.rows)
    yield from axis.ticks(bottom, TOP, scale.factor, f"measured {scale.unit}")
    for number, (name, values) in enumerate(comparison.rows):
        middle = TOP + VIOLIN_ROW * number + VIOLIN_ROW / 2
        shown = np.asarray([v for v in values if axis.low <= v <= axis.high])
        num_outside = len(values) - len(shown)
        rest = f", n = {len(values)}" + (f" ({num_outside} outside)" if num_outside else "")
        yield _label(name, scale(float(np.median(values))), middle, rest)
        if len(shown) > 1:
            yield f'<path class="violin {name}" d="{_violin(shown, axis, middle)}"/>'
        lower, median, upper = np.percentile(values, (25, 50, 75))
        yield f'<path class="middle" d="M{axis.x(lower)} {middle}H{axis.x(upper)}"/>'
        yield f'<path class="median" d="M{axis.x(median)} {middle - 9}v18"/>'


def _violin(values: NDArray[np.float64], axis: _Axis, middle: float) -> str:
    """Outline of a Gaussian kernel density estimate with Silverman's bandwidth."""
    deviation = float(values.std())
    quartile_range = float(np.subtract(*np.percentile(values, (75, 25))))
    spread = min(deviation, quartile_range / 1.349)
    bandwidth = 0.9 * (spread or deviation) * len(values) ** -0.2
    # Equal samples have no spread and are drawn as a thin line.
    bandwidth = bandwidth or 0.002 * (axis.high - axis.low)
    points = np.linspace(
        max(axis.low, values.min() - 2 * bandwidth),
        min(axis.high, values.max() + 2 * bandwidth),
        _DENSITY_POINTS,
    )
    distances = (points[:, None] - values[None, :]) / bandwidth
    density = np.exp(-0.5 * distances**2).sum(axis=1)
    half = density / density.max() * (VIOLIN_ROW / 2 - 4)
    upper = [f"{axis.x(x)} {middle - h:.1f}" for x, h in zip(points, half, strict=True)]
    lower = [f"{axis.x(x)} {middle + h:.1f}" for x, h in zip(points, half, strict=True)][::-1]
    return f"M{'L'.join([*upper, *lower])}Z"


def _intervals(comparison: ComparisonRecord) -> Iterator[str]:
    rows = (
        ("candidate", comparison.low, comparison.ratio, comparison.high),
        ("null", comparison.null_low, None, comparison.null_high),
    )
    low, high = min(row[1] for row in rows), max(row[3] for row in rows)
    axis = _Axis(min(1.0, low), max(1.0, high))
    top = TOP + VIOLIN_ROW * len(comparison.rows) + 50
    bottom = top + INTERVAL_ROW * len(rows)
    yield from axis.ticks(bottom, top, 1.0, "speed-up")
    yield f'<path class="one" d="M{axis.x(1.0)} {top - 6}V{bottom}"/>'
    for number, (name, low, value, high) in enumerate(rows):
        y = top + INTERVAL_ROW * number + INTERVAL_ROW / 2
        yield _label(name, f"{low:.4f} to {high:.4f}", y)
        ends: Sequence[float] = (axis.x(low), axis.x(high))
        yield f'<path class="interval {name}" d="M{ends[0]} {y}H{ends[1]}"/>'
        yield "".join(f'<path class="interval {name}" d="M{x} {y - 5}v10"/>' for x in ends)
        if value is not None:
            yield f'<path class="median" d="M{axis.x(value)} {y - 9}v18"/>'


def _label(name: str, caption: str, y: float, rest: str = "") -> str:
    """Name and caption of a row; narrow screens leave ``rest`` of the caption out."""
    x = LEFT - 12
    return (
        f'<text class="axis" x="{x}" y="{y - 2}" text-anchor="end">{name}</text>'
        f'<text class="caption" x="{x}" y="{y + 13}" text-anchor="end">{caption}'
        f'<tspan class="rest">{rest}</tspan></text>'
    )
