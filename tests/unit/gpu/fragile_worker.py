"""A GPU worker's stand-in that dies of kernels with a lost announcement; imports little, because
every restart pays for it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from nostall.gpu import Kernel, Outcome, Plan, Timing

_WRITE_SB = 14
"""Lowest bit of the write scoreboard in the upper bytes 12..15 of a word; 7 is none."""


class Fragile:
    """Ends the process, or faults, when another number of words than the original's announces no
    result; legal moves keep that number.  The code is ``code`` = (start, end) of the file."""

    def __init__(self, original: bytes, code: tuple[int, int]) -> None:
        self.code, self.silent = code, silent(original, code)

    def about(self) -> Mapping[str, str]:
        return {"gpu": "none"}

    def evaluate(self, cubin: bytes) -> Outcome:
        if silent(cubin, self.code) != self.silent:
            if sum(cubin) % 2:
                os._exit(7)
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
        return Outcome("timed", Timing((1e-5,) * 3, (1e-5 * (1 + sum(cubin) % 7 / 100),) * 3))

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        one = (1e-5,) * rounds
        return Outcome("timed", Timing(one, one, one))


def silent(cubin: bytes, code: tuple[int, int]) -> int:
    """How many instructions announce no result."""
    words = (int.from_bytes(cubin[at + 12 : at + 16], "little") for at in range(*code, 16))
    return sum(word >> _WRITE_SB & 7 == 7 for word in words)


def fragile(code: tuple[int, int], kernel: Kernel, plan: Plan, ordinal: int) -> Fragile:
    return Fragile(kernel.cubin, code)
