"""Text for numbers: values with units, ticks of axes and sizes in bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))
_NAMES = {"us": "µs", "seconds": "s"}


class Scale:
    """Formats values of one unit with the same prefix and decimals, chosen by a typical value."""

    def __init__(self, unit: str, typical: float) -> None:
        """``unit`` is that of the values; only seconds get a prefix."""
        unit = _NAMES.get(unit, unit)
        self.factor, self.unit = 1.0, unit
        if unit == "s" and 0 < typical < math.inf:
            size, name = next((s for s in _SECONDS if typical >= s[0]), _SECONDS[-1])
            self.factor, self.unit = 1 / size, name
        self.decimals: int | None = None
        if 0 < typical < math.inf:
            self.decimals = max(0, 3 - math.floor(math.log10(typical * self.factor)))

    def number(self, value: float) -> str:
        """A value without its unit."""
        scaled = value * self.factor
        if not math.isfinite(scaled):
            return "failed"
        if self.decimals is None or self.decimals > 6:
            return f"{scaled:.5g}"
        return f"{scaled:,.0f}" if abs(scaled) >= 10_000 else f"{scaled:,.{self.decimals}f}"

    def __call__(self, value: float) -> str:
        """A value with its unit."""
        if not math.isfinite(value):
            return "failed"
        return f"{self.number(value)} {self.unit}".rstrip()


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` evenly spaced round numbers between ``low`` and ``high``."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [n * step for n in range(first, last + 1)]


def tick_labels(values: Sequence[float]) -> list[str]:
    """Labels of an axis: all with the decimals that the finest of them needs."""
    texts = [f"{value:.6g}" for value in values]
    if any("e" in text for text in texts):
        return texts
    decimals = max((len(text.partition(".")[2]) for text in texts), default=0)
    return [f"{value:,.{decimals}f}" for value in values]


def format_bytes(count: float) -> str:
    """A number of bytes in the largest unit in which it is at least 1, with three digits."""
    for size, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.3g} {name}"
    return f"{count:.0f} B"
