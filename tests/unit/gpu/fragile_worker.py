"""Fake GPU evaluator that crashes on cubins in which a write scoreboard was removed or added.

It imports little, because every restart of the worker process repeats the imports.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from nostall.gpu import Kernel, MeasurementPlan, Outcome, Timing

_WRITE_SB = 14
"""Lowest bit of the write scoreboard in the upper bytes 12..15 of a word; 7 is none."""


class FragileEvaluator:
    """Crashes if a candidate has another number of instructions without a write scoreboard.

    Legal moves keep that number.  Depending on the candidate it ends the process or raises.
    """

    def __init__(self, original: bytes, code: tuple[int, int]) -> None:
        """``code``: start and end of the instructions in the cubin, in bytes."""
        self.code, self.expected = code, count_without_scoreboard(original, code)

    def info(self) -> Mapping[str, str]:
        return {"gpu": "none"}

    def evaluate(self, cubin: bytes) -> Outcome:
        if count_without_scoreboard(cubin, self.code) != self.expected:
            if sum(cubin) % 2:
                os._exit(7)
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
        return Outcome("timed", Timing((1e-5,) * 3, (1e-5 * (1 + sum(cubin) % 7 / 100),) * 3))

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        samples = (1e-5,) * rounds
        return Outcome("timed", Timing(samples, samples, samples))


def count_without_scoreboard(cubin: bytes, code: tuple[int, int]) -> int:
    """Instructions that set no write scoreboard."""
    words = (int.from_bytes(cubin[at + 12 : at + 16], "little") for at in range(*code, 16))
    return sum(word >> _WRITE_SB & 7 == 7 for word in words)


def make_fragile(
    code: tuple[int, int], kernel: Kernel, plan: MeasurementPlan, ordinal: int
) -> FragileEvaluator:
    return FragileEvaluator(kernel.cubin, code)
