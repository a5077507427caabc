"""Coordinate system and axes of an inline SVG plot over the evaluations of a search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nostall.report.units import ticks

# Width and margins of the plot in pixels.
WIDTH = 1280
LEFT, RIGHT, TOP, BOTTOM = 76, 16, 14, 40


@dataclass(frozen=True, slots=True)
class Plot:
    """Maps evaluations and values to pixels; higher values are drawn higher."""

    height: int
    """Pixels, margins included."""
    first: int
    """Evaluation at the left edge."""
    last: int
    """Evaluation at the right edge."""
    low: float
    """Value at the lower edge."""
    high: float
    """Value at the upper edge; higher values are drawn there, too."""

    @property
    def right(self) -> int:
        return WIDTH - RIGHT

    @property
    def bottom(self) -> int:
        return self.height - BOTTOM

    def open(self, label: str) -> str:
        """The opening tag of the SVG."""
        return (
            f'<svg class="curve" viewBox="0 0 {WIDTH} {self.height}" role="img" '
            f'aria-label="{label}">'
        )

    def x(self, evaluation: float) -> float:
        share = (evaluation - self.first) / (self.last - self.first)
        return round(LEFT + share * (self.right - LEFT), 1)

    def y(self, value: float) -> float:
        share = (min(value, self.high) - self.low) / (self.high - self.low)
        return round(self.bottom - share * (self.bottom - TOP), 1)

    def point(self, evaluation: float, value: float) -> str:
        """The coordinates of a point, for a path."""
        return f"{self.x(evaluation)} {self.y(value)}"

    def axes(
        self, title: str, values: Iterable[tuple[float, str]], base: float | None = None
    ) -> Iterator[str]:
        """Both axes.

        ``title`` and ``values`` (ticks with their labels) are those of the vertical axis.  The line
        of the tick ``base`` has the style of the original's line.
        """
        for value, label in values:
            y = self.y(value)
            line = "start" if value == base else "grid"
            yield f'<path class="{line}" d="M{LEFT} {y}H{self.right}"/>'
            yield f'<text class="tick" x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{label}</text>'
        for tick in ticks(self.first, self.last, 8):
            if tick == int(tick):
                x = self.x(tick)
                yield f'<path class="grid" d="M{x} {self.bottom}v5"/>'
                yield (
                    f'<text class="tick" x="{x}" y="{self.bottom + 18}" text-anchor="middle">'
                    f"{int(tick):,}</text>"
                )
        yield (
            f'<text class="axis" transform="translate(16 {(TOP + self.bottom) / 2}) rotate(-90)" '
            f'text-anchor="middle">{title}</text>'
            f'<text class="axis" x="{(LEFT + self.right) / 2}" y="{self.height - 6}" '
            'text-anchor="middle">evaluations</text>'
        )
