"""Fresh and stale values of each pass and thread, from a seed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.sass.distances.microkernels.consumers import Values
from benchmarks.sass.distances.microkernels.kernel import SHARED_START
from benchmarks.sass.distances.microkernels.windows import PASSES, THREADS

KINDS: tuple[Values, ...] = ("data", "uniform", "predicate", "shared", "global", "global_high",
                             "constant", "offset", "shift", "magnitude", "exponent")  # fmt: skip
SLOT_BYTES = 32
"""Bytes of the two address slots of a thread: fresh first, stale 16 bytes after it."""
WARP = 32


def input_values(kind: Values, seed: int, slots: int) -> NDArray[np.uint32]:
    """The input buffer of a kind, shape (passes, threads, 4): fresh, stale, fresh high, stale high.

    ``slots``: global address of the slots of all threads.  Numbers have the bits 0x3f8..0x3ff with
    bit 14 clear: normal as a float, as both words of a double, and as two halves.
    """
    rng = np.random.default_rng(seed)
    shape = (PASSES, THREADS, 4)
    numbers = rng.integers(0, 1 << 23, shape, np.uint32) & np.uint32(0x7F3FFF)
    numbers |= np.uint32(0x3F800000)
    if kind == "magnitude":
        numbers = numbers & np.uint32(0x7FFFFF) | rng.integers(0x82, 0x95, shape, np.uint32) << 23
    if kind == "exponent":
        tops = rng.integers(1, 7, shape, np.uint32)
        numbers[..., :2] = numbers[..., :2] & np.uint32(0xFFFFFFF) | tops[..., :2] << 28
    if kind == "shift":
        numbers &= np.uint32(31)
        numbers[..., 1::2] = (numbers[..., ::2] + 1 + numbers[..., 1::2] % 31) % 32
    if kind in ("uniform", "predicate", "offset", "shift"):
        numbers = np.repeat(numbers[:, ::WARP], WARP, axis=1)
    values = numbers.copy()
    if kind == "predicate":
        values[..., 0] = numbers[..., 0] & 1
        values[..., 1] = 1 - values[..., 0]
        values[..., 2] = 0
    swap = (numbers[..., 3] & 1).astype(bool)
    thread = np.arange(THREADS, dtype=np.uint32) * SLOT_BYTES
    if kind in ("shared", "global", "global_high"):
        base = SHARED_START if kind == "shared" else slots & 0xFFFFFFFF
        values[..., 0] = base + thread + 16 * swap
        values[..., 1] = base + thread + 16 * ~swap
    if kind in ("global", "global_high"):
        values[..., 2:] = slots >> 32
    if kind == "global_high":
        values[..., 1] = values[..., 0]
        values[..., 2] += swap
        values[..., 3] += ~swap
    if kind == "constant":
        values[..., 0], values[..., 1] = 0, 8
    if kind == "offset":
        values[..., 0], values[..., 1] = 16 * swap, 16 * ~swap
    return values
