"""A headline: ratios of one level beside its strongest baseline, with card, date and losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from benchmarks.front.measured_code import has_changed
from benchmarks.harness.result_file import ROOT

HEAD = ("level", "beside", "gain: mean (worst to best)", "of", "GPU, day", "when it does not help")
"""Columns of a headline's row."""


@dataclass(frozen=True)
class Headline:
    """Measured ratios: time of the baseline / time of nostall's result; below 1 nostall loses."""

    level: str
    beside: str
    """The strongest baseline that was measured."""
    ratios: tuple[float, ...]
    """Of what ships: without choices that only the measurement could make."""
    unit: str
    """What one ratio is of, in the plural."""
    gpu: str
    date: str
    """Day of the measurement."""
    no_help: str
    """When it does not help."""
    page: str
    """Page below ``docs/results``."""
    files: tuple[Path, ...]
    """Committed result files."""
    code: tuple[str, ...]
    """Folders below ``src/nostall`` whose code was measured."""
    digits: int = 2
    label: str = ""
    """Row of the picture; empty if the level and the baseline say it."""

    @property
    def mean(self) -> float:
        return geometric_mean(self.ratios)

    @property
    def gain(self) -> str:
        """Mean, worst and best."""
        low, high = min(self.ratios), max(self.ratios)
        return f"**{self.mean:.{self.digits}f}** ({low:.2f} to {high:.2f})"

    @property
    def measured(self) -> str:
        """GPU and date, with a mark if the code has changed since."""
        mark = " †" if has_changed(self.files, self.code) else ""
        return f"{self.gpu}, {self.date}{mark}"

    @property
    def sentence(self) -> str:
        """The first sentence of a result page."""
        low, high = min(self.ratios), max(self.ratios)
        below = sum(ratio < 1 for ratio in self.ratios)
        changed = (
            " The measured code has changed since." if has_changed(self.files, self.code) else ""
        )
        return (
            f"**{self._beginning} beside {self.beside}: "
            f"{self.mean:.{self.digits}f} times as fast in the geometric mean of "
            f"{len(self.ratios)} {self.unit}, {low:.2f} to {high:.2f}; {below} below 1.** "
            f"{self.gpu}, {self.date}.{changed} When "
            f"it does not help: {self.no_help}."
        )

    @property
    def _beginning(self) -> str:
        """The level as the beginning of a sentence; names such as vLLM stay as they are."""
        first, *_ = self.level.split()
        start = self.level[0] if first != first.lower() else self.level[0].upper()
        return start + self.level[1:]

    @property
    def row(self) -> tuple[str, ...]:
        """Cells of README's table."""
        return (
            f"[{self.level}](docs/results/{self.page})", self.beside, self.gain,
            f"{len(self.ratios)} {self.unit}", self.measured, self.no_help,
        )  # fmt: skip


def day(content: Sequence[dict[str, object]] | dict[str, object]) -> str:
    """The day of the latest of some result files."""
    contents = [content] if isinstance(content, dict) else content
    return max(str(one["date"])[:10] for one in contents)


def below(level: str, *names: str) -> tuple[Path, ...]:
    """Result files of a level; a name may be a pattern."""
    folder = ROOT / level / "results"
    return tuple(path for name in names for path in sorted(folder.glob(name)))
