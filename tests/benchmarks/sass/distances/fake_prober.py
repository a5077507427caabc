"""A device that reads the patched words of an experiment and applies a given latency table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from benchmarks.sass.distances.microkernels import registers as r
from benchmarks.sass.distances.microkernels.kernel import Experiment
from benchmarks.sass.distances.microkernels.windows import (
    BURST_LENGTH,
    PASSES,
    TAIL,
    consumer_word,
    ordered,
)
from benchmarks.sass.distances.microkernels.words import word
from benchmarks.sass.distances.observe import Condition, Records

from nostall.sass.binary.cubin import Cubin
from nostall.sass.binary.encoding import WORD_BYTES, decode

FIRST_CLOCK = word("CS2R.32 R{d}, SR_CLOCKLO", d=r.CLOCK_BEFORE)
SECOND_CLOCK = word("CS2R.32 R{d}, SR_CLOCKLO", d=r.CLOCK_AFTER)
NOP = word("NOP")
OVERHEAD = 2
"""Cycles that the fake clock shows beyond the stalls."""

Minimum = Callable[[str, Condition, int, bool], int]
"""(pair, condition, position of the producer modulo 8, whether it yields) -> minimum distance."""


@dataclass
class FakeProber:
    """Stale results below the minimum distance; every fourth thread is delayed by one cycle."""

    minimum: Minimum
    mixes: bool = False
    """Whether results one cycle below the minimum mix a stale first word and a fresh second one."""
    launches: list[Condition] = field(default_factory=list[Condition])

    def run(self, cubin: bytes, subject: Experiment, condition: Condition) -> Records:
        self.launches.append(condition)
        threads = 32 * condition.warps
        shape = (subject.count, PASSES, threads)
        rng = np.random.default_rng(7)
        fresh, stale = (rng.integers(0, 1 << 32, (*shape[1:], 2), np.uint32) for _ in range(2))
        mixed = np.stack((stale[..., 0], fresh[..., 1]), axis=-1)
        words, cycles = np.empty((*shape, 2), np.uint32), np.empty(shape, np.uint32)
        delays = (np.arange(threads) % 4 == 3) & (condition.warps > 1)
        for at, (distance, place, produces, yields) in enumerate(read_windows(cubin, subject)):
            minimum = self.minimum(subject.pair.name, condition, place, yields)
            too_close = (distance + delays < minimum) | (not produces)
            words[at] = np.where(too_close[..., None], stale, fresh)
            if self.mixes and distance == minimum - 1:
                words[at] = mixed
            if subject.windows[at].stale_words:
                words[at] = mixed if subject.windows[at].stale_words == 1 else stale ^ fresh
            cycles[at] = subject.windows[at].lead + distance + TAIL + OVERHEAD + delays
        return Records(words[..., 0] ^ words[..., 1] << 1, cycles, words)


def read_windows(cubin: bytes, subject: Experiment) -> list[tuple[int, int, bool, bool]]:
    """(distance, position modulo 8, whether it produces, whether it yields) of each window.

    The distance of a window with stale words is not between its clock reads, so it is negative.
    """
    text = Cubin.parse(cubin).texts[0]
    code = cubin[text.file_offset : text.file_offset + text.size]
    words = [
        decode(int.from_bytes(code[at : at + WORD_BYTES], "little"))
        for at in range(0, len(code), WORD_BYTES)
    ]
    starts = [at for at, (payload, _) in enumerate(words) if payload == FIRST_CLOCK]
    is_war = subject.pair.kind == "WAR"
    rows: list[tuple[int, int, bool, bool]] = []
    for window, start in zip(subject.windows, starts, strict=True):
        end = next(at for at in range(start, len(words)) if words[at][0] == SECOND_CLOCK)
        cycles = sum(control.stall for _, control in words[start:end])
        place = start + 1 + (BURST_LENGTH if window.spacing == "burst" else 0)
        first, control = words[place]
        expected = [code for _, code in ordered(subject.pair, window)]
        produces = first == expected[0] and NOP not in expected
        if is_war:
            produces = first == consumer_word(subject.pair)
        rows.append((cycles - window.lead - TAIL, (start + 1) % 8, produces, control.yields))
    return rows
