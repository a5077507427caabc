"""Compiled parts of a simulated step: its content, the blocks it needs, and what it changes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.serving.simulate.running import (
    KEYS,
    OUTPUT_LEFT,
    PROMPT_LEFT,
    REQUEST,
    ROOM,
    SKIPPED,
)

Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]

NO_REFERENCE_COUNTS = {"cache": True, "_nrt": False}
"""Options of functions that allocate nothing: numba then counts no references."""


class Outcomes(NamedTuple):
    """What the requests of a trace have received, one entry each."""

    generated: Int64s
    first_token_s: Floats
    """Time of the first token; not a number before it."""
    last_token_s: Floats


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def step_content(table: Int64s, tokens: Int64s) -> tuple[int, int, int, int]:
    """Prefill tokens, their query-key pairs, decode tokens, and keys of decodes of a step."""
    prefill = pairs = decode = keys = 0
    for place in range(len(tokens)):
        count = tokens[place]
        if count and table[place, PROMPT_LEFT] > 0:
            prefill += count
            pairs += count * table[place, KEYS] + count * (count + 1) // 2
        elif count:
            decode += count
            keys += table[place, KEYS] + count
    return prefill, pairs, decode, keys


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def missing_blocks(table: Int64s, tokens: Int64s, block: int, missing: Int64s) -> int:
    """Write the blocks that each request needs for its tokens; returns their sum."""
    total = 0
    for place in range(len(tokens)):
        short = max(tokens[place] - table[place, ROOM], 0)
        missing[place] = (short + block - 1) // block
        total += missing[place]
    return total


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def advance(
    table: Int64s, tokens: Int64s, most_emitted: Int64s, now: float, outcomes: Outcomes,
    gaps: Floats,
) -> tuple[int, int, int]:  # fmt: skip
    """Apply a step that ends now: compute its tokens and emit what they yield.

    A prefill emits one token with the last token of its prompt; a decode emits at most
    ``most_emitted``. Writes the time between tokens of each emitted token but a request's first to
    ``gaps``. Returns the number of these, of prompts that are complete now (their SKIPPED is -1),
    and of requests that have all their tokens.
    """
    gap_count = completed = finished = 0
    for place in range(len(tokens)):
        count = tokens[place]
        if count == 0:
            table[place, SKIPPED] += 1
            continue
        table[place, SKIPPED] = 0
        emitted = 0
        if table[place, PROMPT_LEFT] > 0:
            table[place, PROMPT_LEFT] -= count
            if table[place, PROMPT_LEFT] == 0:
                emitted = 1
                completed += 1
                table[place, SKIPPED] = -1
        else:
            emitted = min(count, most_emitted[place])
            count = emitted
        table[place, KEYS] += count
        table[place, ROOM] -= count
        if emitted:
            request = table[place, REQUEST]
            if np.isnan(outcomes.first_token_s[request]):
                outcomes.first_token_s[request] = now
            else:
                gap = (now - outcomes.last_token_s[request]) / emitted
                gaps[gap_count : gap_count + emitted] = gap
                gap_count += emitted
            outcomes.last_token_s[request] = now
            outcomes.generated[request] += emitted
            table[place, OUTPUT_LEFT] -= emitted
            finished += table[place, OUTPUT_LEFT] <= 0
    return gap_count, completed, finished
