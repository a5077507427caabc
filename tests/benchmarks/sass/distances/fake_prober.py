"""A device that reads the patched words of an experiment and applies a given latency table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from benchmarks.sass.distances.microkernels import registers as r
from benchmarks.sass.distances.microkernels.kernel import Experiment
from benchmarks.sass.distances.microkernels.windows import LEAD, PASSES, TAIL, producer_word
from benchmarks.sass.distances.microkernels.words import word
from benchmarks.sass.distances.observe import Condition, Words

from nostall.sass.binary.cubin import Cubin
from nostall.sass.binary.encoding import WORD_BYTES, decode

FIRST_CLOCK = word("CS2R.32 R{d}, SR_CLOCKLO", d=r.CLOCK_BEFORE)
SECOND_CLOCK = word("CS2R.32 R{d}, SR_CLOCKLO", d=r.CLOCK_AFTER)
OVERHEAD = 2
"""Cycles that the fake clock shows beyond the stalls."""

Minimum = Callable[[str, Condition, int, bool], int]
"""(pair, condition, position of the producer modulo 8, whether it yields) -> minimum distance."""


@dataclass
class FakeProber:
    """Stale results below the minimum distance; every fourth thread is delayed by one cycle."""

    minimum: Minimum
    launches: list[Condition] = field(default_factory=list[Condition])

    def run(self, cubin: bytes, subject: Experiment, condition: Condition) -> tuple[Words, Words]:
        self.launches.append(condition)
        threads = 32 * condition.warps
        shape = (subject.count, PASSES, threads)
        rng = np.random.default_rng(7)
        fresh, stale = (rng.integers(0, 1 << 32, shape[1:], np.uint32) for _ in range(2))
        hashes, cycles = np.empty(shape, np.uint32), np.empty(shape, np.uint32)
        delays = (np.arange(threads) % 4 == 3) & (condition.warps > 1)
        for at, (distance, place, produces, yields) in enumerate(read_windows(cubin, subject)):
            minimum = self.minimum(subject.pair.name, condition, place, yields)
            too_close = (distance + delays < minimum) | (not produces)
            hashes[at] = np.where(too_close, stale, fresh)
            cycles[at] = LEAD + distance + TAIL + OVERHEAD + delays
        return hashes, cycles


def read_windows(cubin: bytes, subject: Experiment) -> list[tuple[int, int, bool, bool]]:
    """(distance, position modulo 8, whether it produces, whether it yields) of each window."""
    text = Cubin.parse(cubin).texts[0]
    code = cubin[text.file_offset : text.file_offset + text.size]
    words = [
        decode(int.from_bytes(code[at : at + WORD_BYTES], "little"))
        for at in range(0, len(code), WORD_BYTES)
    ]
    starts = [at for at, (payload, _) in enumerate(words) if payload == FIRST_CLOCK]
    producer = producer_word(subject.pair)
    rows: list[tuple[int, int, bool, bool]] = []
    for start in starts:
        end = next(at for at in range(start, len(words)) if words[at][0] == SECOND_CLOCK)
        cycles = sum(control.stall for _, control in words[start:end])
        first, control = words[start + 1]
        rows.append((cycles - LEAD - TAIL, (start + 1) % 8, first == producer, control.yields))
    return rows
