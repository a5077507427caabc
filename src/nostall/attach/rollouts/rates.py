"""Token rates of the turns of two engines, and their ratio beside that of one engine with itself.

Records are those of :mod:`nostall.attach.rollouts.turns`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from nostall.attach.rollouts.workload import REPEATS
from nostall.core.measurement import Comparison

RESAMPLES = 2000
Row = Mapping[str, Any]
"""A workload of one engine."""


class Pair(NamedTuple):
    """Turns of the same steps, by two engines or twice by one."""

    ours: Row
    base: Row


def rates(row: Row) -> list[float]:
    """Tokens a second of each turn."""
    return [rate([turn]) for turn in row["turns"]]


def rate(turns: Sequence[Row]) -> float:
    """Tokens a second of several turns together."""
    tokens, seconds = (sum(float(turn[key]) for turn in turns) for key in ("tokens", "seconds"))
    return tokens / seconds


def compare(ours: Row, base: Row, *, is_ragged: bool = False) -> Comparison:
    """Token rate of ``ours`` over that of ``base``.

    The ratio is the median of the turns' pairs, or of all tokens over all seconds if the requests
    end at different steps (``is_ragged``): such turns differ. The null has both engines' turns over
    their own turns of the equal generation before; [1, 1] if there is none.
    """
    pairs = [Pair(a, b) for a, b in zip(ours["turns"], base["turns"], strict=False)]
    ratio, low, high = _interval(pairs, is_ragged)
    again = [pair for row in (ours, base) for pair in repeated(row)]
    _, null_low, null_high = _interval(again, is_ragged) if again else (1.0, 1.0, 1.0)
    return Comparison(ratio, low, high, null_low, null_high, "measured")


def repeated(row: Row) -> Iterator[Pair]:
    """Equal turns of equal generations of one engine."""
    by_generation = {
        number: list(turns)
        for number, turns in groupby(row["turns"], lambda turn: turn.get("generation", 0))
    }
    for number, turns in by_generation.items():
        if number % REPEATS == 0:
            for turn, other in zip(turns, by_generation.get(number + 1, []), strict=False):
                yield Pair(other, turn)


def whole_rate(row: Row) -> float | None:
    """Tokens a second of all generations, from their first tokens to their last; None: unknown."""
    return _whole(row, with_prompts=False)


def rate_with_prompts(row: Row) -> float | None:
    """As :func:`whole_rate`, of the first generation and with the time to compute its prompts."""
    return _whole(row, with_prompts=True)


def _whole(row: Row, *, with_prompts: bool) -> float | None:
    tokens, seconds = 0.0, 0.0
    for about in row.get("generations", [])[: 1 if with_prompts else None]:
        if "finish_s" not in about:
            return None
        turns = [t for t in row["turns"] if t["generation"] == about["generation"]]
        tokens += float(about["all_tokens"])
        times = [about["first_tokens_s"], about["finish_s"], *(t["seconds"] for t in turns)]
        seconds += sum(map(float, times)) + float(about["cache_prompts_s"]) * with_prompts
    return tokens / seconds if tokens else None


def equal_tokens(ours: Row, base: Row) -> float | None:
    """Share of the requests whose first tokens are equal in both engines; None: unknown."""
    for one, other in zip(ours.get("generations", []), base.get("generations", []), strict=False):
        if "compared" in one and "compared" in other:
            pairs = zip(one["compared"], other["compared"], strict=False)
            equal = [float(a == b) for a, b in pairs]
            return sum(equal) / max(1, len(equal))
    return None


def _interval(pairs: Sequence[Pair], is_ragged: bool) -> tuple[float, float, float]:
    """The ratio of pairs, and the ends of its 95 % bootstrap interval."""
    if not is_ragged:
        ours, base = ([rate([turn]) for turn in side] for side in zip(*pairs, strict=True))
        found = Comparison.from_samples(ours, base, kind="measured")
        return found.ratio, found.low, found.high
    sides = [[[turn[key] for turn in pair] for pair in pairs] for key in ("tokens", "seconds")]
    tokens, seconds = (np.asarray(side, np.float64) for side in sides)
    every = np.arange(len(pairs))
    draws = np.random.default_rng(0).integers(0, len(pairs), size=(RESAMPLES, len(pairs)))
    low, high = np.quantile(_ratio_of_sums(tokens, seconds, draws), [0.025, 0.975])
    return float(_ratio_of_sums(tokens, seconds, every[None])[0]), float(low), float(high)


def _ratio_of_sums(tokens: Any, seconds: Any, draws: Any) -> Any:
    """Our rate over the base's, for each row of drawn pairs."""
    totals = tokens[draws].sum(axis=1) / seconds[draws].sum(axis=1)
    return totals[:, 0] / totals[:, 1]
