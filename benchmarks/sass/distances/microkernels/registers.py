"""Registers of a micro-kernel: what each register holds in every experiment."""

from __future__ import annotations

from benchmarks.sass.distances.microkernels.words import RZ, URZ

# Values of one pass, loaded from the input buffer.
FRESH, STALE, FRESH_HIGH, STALE_HIGH = 12, 13, 14, 15
FRESH_PAIR, STALE_PAIR = 20, 22
"""Copies of (FRESH, FRESH_HIGH) and of (STALE, STALE_HIGH) in aligned pairs."""
U_FRESH, U_STALE = 16, 18
"""Uniform copies: each is the first register of an aligned pair."""

TARGET, U_TARGET, P_TARGET = 40, 12, 0
"""First register that a producer writes and a consumer reads: general, uniform, predicate."""
P_FRESH, P_FALSE = 1, 2
"""Predicates: whether FRESH is not zero; false in every pass (the uniform one, too)."""
RESULT, U_RESULT, P_RESULT = 64, 24, 3
"""First register that a consumer writes: general, uniform, predicate."""

RAW_RESULT = 68
"""Copies of the first two words of the result."""

# Bookkeeping.
THREAD, OUT, IN, PASS, RECORD = 0, 2, 4, 6, 7
CLOCK_BEFORE, CLOCK_AFTER = 8, 9
IN_BASE, OUT_BASE = 10, 16
SCRATCH, SCRATCH_SHARED, OTHER_SHARED, FLAG = 60, 62, 63, 39
"""Global and shared address of a slot for each thread; the shared address after it; shared address
of the end flag."""
TEMPORARY, OTHER_TEMPORARY = 18, 19
P_LOOP, P_ROLE = 6, 5

VALUES = {
    "ZERO_MINUS_ONE": (35, 0xFFFFFFFF),
    "ONE": (25, 1),
    "FLOAT_ONE": (26, 0x3F800000),
    "HALF_ONE": (27, 0x3C003C00),
    "DOUBLE_ONE": (28, 0x00000000),
    "DOUBLE_ONE.1": (29, 0x3FF00000),
    "BYTES": (30, 0x3210),
    "HIGH_BYTES": (70, 0x7654),
    "FLOAT_ZERO": (31, 0x80000000),
    "HALF_ZERO": (34, 0x80008000),
    "DOUBLE_ZERO": (36, 0x00000000),
    "DOUBLE_ZERO.1": (37, 0x80000000),
    "MINUS_TWO": (38, 0xFFFFFFFE),
    "A": (44, 0x3FA01234),
    "A.1": (45, 0x3FC05678),
    "B": (46, 0x3FB0159D),
    "B.1": (47, 0x3FD0159D),
    "C": (32, 0x3F90048C),
    "C.1": (33, 0x3FE0048C),
    "MMA_A": (48, 0x3C003C00),
    "MMA_A.1": (49, 0x3C003E00),
    "MMA_A.2": (50, 0x3E003C00),
    "MMA_A.3": (51, 0x3D003D00),
    "MMA_B": (52, 0x3C003E00),
    "MMA_B.1": (53, 0x3D003C00),
    "MINUS_ONE_64": (54, 0xFFFFFFFF),
    "MINUS_ONE_64.1": (55, 0xFFFFFFFF),
    "MMA_C": (56, 0x3F8A0000),
    "MMA_C.1": (57, 0x3F8B0000),
    "MMA_C.2": (58, 0x3F8C0000),
    "MMA_C.3": (59, 0x3F8D0000),
    "FIVE": (24, 5),
}
"""Name of a constant -> (general register, 32-bit value).  ``.1`` to ``.3`` are later words."""

UNIFORM_VALUES = {"U_ONE": (20, "ONE"), "U_ALL": (21, "ZERO_MINUS_ONE"),
                  "U_BYTES": (22, "BYTES"), "U_A": (30, "A"), "U_A.1": (31, "A.1"),
                  "U_B": (28, "B"), "U_B.1": (29, "B.1")}  # fmt: skip
"""Name of a constant -> (uniform register, general constant with its value)."""

NUMBERS = {
    **{name: register for name, (register, _) in VALUES.items()},
    **{name: register for name, (register, _) in UNIFORM_VALUES.items()},
    "ZERO": RZ,
    "U_ZERO": URZ,
    "UZ": URZ,
    "FRESH": FRESH,
    "STALE": STALE,
    "FRESH_PAIR": FRESH_PAIR,
    "STALE_PAIR": STALE_PAIR,
    "THREAD": THREAD,
    "SCRATCH": SCRATCH,
    "SCRATCH_SHARED": SCRATCH_SHARED,
    "OTHER_SHARED": OTHER_SHARED,
    "U_STALE": U_STALE,
    "U_FRESH": U_FRESH,
    "P_FRESH": P_FRESH,
    "PT": 7,
    "NO": P_FALSE,
    "FRESH_QUAD": FRESH_PAIR,
    "RESULT": RESULT,
    "RESULT.1": RESULT + 1,
}
"""Name -> register number, as the tables of producers and consumers write their operands."""
