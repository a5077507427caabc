"""Fill the table over M of a layer: an entry other than F.linear only where it is surely faster.

For each M of a grid all candidates are measured once. The fastest are measured twice more, each
time with fresh graphs, next to F.linear and its null. An entry is taken only if both 95 %
intervals say that it is faster by more than two captures of the same product differ, and if it is
not slower at the smallest and at a middle M that it would serve.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from triton.runtime.errors import TritonError

from nostall.core.errors import NostallError
from nostall.core.measurement import Comparison
from nostall.gpu.clock import Clock, Run
from nostall.serving.gemm.config import LinearShape, candidates
from nostall.serving.gemm.table import Cublas, Entry, GemmTable, LtAlgorithm, Padded, Row

GRID = (
    1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256,
    320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 4096,
)  # fmt: skip
"""The Ms that are measured: each is the last of those that its entry serves."""
TRITON_LIMIT = 256
"""Largest M for which Triton configurations are tried; above it cuBLAS is far ahead (measured)."""
MULTIPLES = (8, 16, 64)
"""Multiples to which M is rounded up."""
FINALISTS = 2
CONFIRMATIONS = 2
LEAST_GAIN = 1.015
"""Ratio that the lower end of the interval must exceed: two captures of one product differ by up to
1.4 % on an H200 (benchmarks/serving/results/gemm_h200.json.gz), because their buffers do."""
SCREEN_SECONDS, CONFIRM_SECONDS = 0.02, 0.25
"""About how long one candidate is measured: at first, and in the confirmation."""
Note = Callable[[str], None]


class Layer(Protocol):
    """A layer whose entries can be run for any M."""

    @property
    def shape(self) -> LinearShape: ...

    @property
    def sms(self) -> int: ...

    def run(self, entry: Entry, m: int) -> Run:
        """A run of the layer with ``m`` rows; raises an error if the entry cannot compute it."""
        ...

    def algorithms(self, m: int) -> list[bytes]:
        """The algorithms that cuBLASLt proposes, best first."""
        ...


@dataclass(frozen=True)
class Tuner:
    """Tunes layers by one clock until a deadline."""

    clock: Clock
    gpu: str
    versions: tuple[tuple[str, str], ...]
    deadline: float
    """Value of ``time.monotonic`` behind which every further row is F.linear."""
    note: Note = print

    def tune(self, layer: Layer, grid: Sequence[int] = GRID) -> GemmTable:
        """The table of a layer."""
        rows = []
        before = 0
        for m in grid:
            row = self._row(layer, before + 1, m)
            if not isinstance(row.entry, Cublas):
                self.note(f"M {before + 1} to {m}: {row.entry} {row.ratio:.3f} x")
            rows.append(row)
            before = m
        return GemmTable(layer.shape, self.gpu, self.versions, _joined(rows))

    def _row(self, layer: Layer, first: int, m: int) -> Row:
        """The row for the Ms from ``first`` to ``m``."""
        nothing = Row(m, Cublas())
        if time.monotonic() > self.deadline:
            return nothing
        for entry in self._screen(layer, m):
            last = self._confirmed(layer, entry, m)
            others = sorted({first, (first + m) // 2} - {m})
            if last is not None and all(self._is_no_loss(layer, entry, at) for at in others):
                return Row(m, entry, last.ratio, last.low)
        return nothing

    def _confirmed(self, layer: Layer, entry: Entry, m: int) -> Comparison | None:
        """The last of the confirmations, or None if one of them is not surely faster."""
        last = None
        for number in range(CONFIRMATIONS):
            last = self._compare(layer, entry, m, f"confirmation {number}")
            if last is None or last.verdict != "faster" or last.low < LEAST_GAIN:
                return None
        return last

    def _is_no_loss(self, layer: Layer, entry: Entry, m: int) -> bool:
        """Whether an entry is not slower for another M."""
        found = self._compare(layer, entry, m, "other M")
        return found is not None and found.verdict != "slower" and found.ratio >= 1.0

    def _screen(self, layer: Layer, m: int) -> list[Entry]:
        """The fastest candidates that seem faster than F.linear, best first."""
        entries: list[Entry] = [Padded(multiple) for multiple in MULTIPLES if m % multiple]
        entries += [LtAlgorithm(algorithm) for algorithm in layer.algorithms(m)]
        if m <= TRITON_LIMIT:
            entries += candidates(m, layer.shape, layer.sms)
        medians: list[tuple[float, int]] = []
        base = 0.0
        for start in range(0, len(entries), 8):
            chunk = range(start, min(start + 8, len(entries)))
            runs = [(index, self._try(layer, entries[index], m)) for index in chunk]
            usable = [(index, run) for index, run in runs if run is not None]
            linear = layer.run(Cublas(), m)
            key = f"{layer.shape} M={m} screen {start}"
            seconds = SCREEN_SECONDS * (len(usable) + 1)
            samples = self.clock.samples(key, [linear, *(run for _, run in usable)], seconds)
            base = statistics.median(samples[0])
            medians += [
                (statistics.median(values) / base, index)
                for (index, _), values in zip(usable, samples[1:], strict=True)
            ]
        return [entries[index] for ratio, index in sorted(medians)[:FINALISTS] if ratio < 1.0]

    def _try(self, layer: Layer, entry: Entry, m: int) -> Run | None:
        """A run that has worked once, or None."""
        try:
            run = layer.run(entry, m)
            run()
        except (RuntimeError, ValueError, NostallError, TritonError) as error:
            self.note(f"M {m}: {entry} cannot run: {str(error).splitlines()[0][:120]}")
            return None
        return run

    def _compare(self, layer: Layer, entry: Entry, m: int, what: str) -> Comparison | None:
        """F.linear against an entry, measured anew; None if the entry cannot run."""
        run = self._try(layer, entry, m)
        if run is None:
            return None
        runs = [layer.run(Cublas(), m), run, layer.run(Cublas(), m)]
        key = f"{layer.shape} M={m} {what}"
        linear, candidate, null = self.clock.samples(key, runs, CONFIRM_SECONDS)
        return Comparison.from_samples(linear, candidate, null, kind=self.clock.kind)


def _joined(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Rows without neighbours that both say F.linear."""
    kept: list[Row] = []
    for row in rows:
        if kept and isinstance(row.entry, Cublas) and isinstance(kept[-1].entry, Cublas):
            kept.pop()
        kept.append(row)
    return tuple(kept)
