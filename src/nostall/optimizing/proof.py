"""Whether a change made the program's steps faster, from measured blocks of real steps."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import median, quantiles
from typing import Any

from nostall.core.measurement import Comparison

ORIGINAL, CHANGED, NULL = 0, 1, 2
"""Arms: the program as it is, with the change, and as it is a second time."""
MIN_PAIRS = 6
CARRIED = 0.1
"""Share by which the original may be slower after the changed arm before the proof is refused."""


@dataclass(frozen=True)
class Proof:
    """The verdict on a change."""

    comparison: Comparison | None
    refusal: str = ""
    """Why there is no comparison, or why it does not count; empty if it counts."""
    pairs: int = 0
    seconds: tuple[float, float] = (0.0, 0.0)
    """Median seconds of a step: original, changed."""

    @property
    def faster(self) -> bool:
        """Whether the change is kept."""
        return not self.refusal and self.comparison is not None and (
            self.comparison.verdict == "faster"
        )  # fmt: skip


def block_order(rounds: int, seed: int) -> list[int]:
    """Arms of ``3 * rounds`` blocks; the order in each round is random.

    Batches that repeat with some period therefore fall on all arms alike.
    """
    generator = random.Random(seed)
    order: list[int] = []
    for _ in range(rounds):
        arms = [ORIGINAL, CHANGED, NULL]
        generator.shuffle(arms)
        order += arms
    return order


def prove(
    blocks: Sequence[Mapping[str, Any]], *, each: bool, bound: float | None = None, seed: int = 0
) -> Proof:
    """Compare the arms of ``blocks``, events of one order.

    ``each``: steps differ and were timed one by one; otherwise blocks are compared.  Both are
    paired by the work that they did.  ``bound``: what the change can gain at most.
    """
    if failures := sorted({str(f) for block in blocks for f in block.get("failures", ())}):
        return Proof(None, f"the changed version failed in a step: {failures[0]}")
    samples = _samples(blocks, each)
    pairs = len(samples[ORIGINAL])
    if pairs < MIN_PAIRS:
        return Proof(
            None,
            f"{pairs} comparable pairs of steps, {MIN_PAIRS} are needed: steps did different work, "
            "skipped the optimiser or compiled",
            pairs,
        )
    comparison = Comparison.from_samples(
        samples[ORIGINAL], samples[CHANGED], samples[NULL], kind="measured", seed=seed
    )
    count = 1 if each else len(blocks[0]["steps"])
    seconds = median(samples[ORIGINAL]) / count, median(samples[CHANGED]) / count
    return Proof(comparison, _suspicion(blocks, comparison, bound), pairs, seconds)


def prove_starts(
    originals: Sequence[Sequence[float]], changed: Sequence[Sequence[float]], seed: int
) -> Proof:
    """Compare starts of a program, at least one each; of each start, seconds of some of its parts.

    The null compares starts of the original; of a single one, its parts in turned order.
    """
    count = len(originals)
    again = [*originals[1:], originals[0]] if count > 1 else [originals[0][::-1]]
    comparison = Comparison.from_samples(
        *([*chain(*samples)] for samples in (originals, changed, again)), kind="measured",
        seed=seed, loads=count,
    )  # fmt: skip
    refusal = ""
    slowest, fastest = max(map(median, changed)), min(map(median, originals))
    if count > 1 and comparison.ratio > 1 and slowest >= fastest:
        refusal = "a start with it is as slow as one without"
    seconds = median(chain(*originals)), median(chain(*changed))
    return Proof(comparison, refusal, sum(map(len, changed)), seconds)


def _samples(blocks: Sequence[Mapping[str, Any]], each: bool) -> list[list[float]]:
    """Seconds of each arm, of single steps or whole blocks: of each kind of work equally many.

    Blocks of programs with a shorter last batch hold one such step more or less: those of a round
    that differ are paired with others.  A round in which one compiled or skipped has no samples,
    because the arms would have theirs at different times of the run.
    """
    by_work: dict[Any, list[list[float]]] = defaultdict(lambda: [[], [], []])
    for at in range(0, len(blocks), 3):
        group = blocks[at : at + 3]
        if each:
            for block in group:
                for key, seconds, skipped in block["steps"]:
                    if not skipped and not block["compiled"]:
                        by_work[key][block["arm"]].append(seconds)
        elif not any(b["compiled"] or any(step[2] for step in b["steps"]) for b in group):
            works = [tuple(sorted(key for key, _, _ in block["steps"])) for block in group]
            for work, block in zip(works, group, strict=True):
                by_work[work, len(set(works)) == 1][block["arm"]].append(block["seconds"])
    samples: list[list[float]] = [[], [], []]
    for arms in by_work.values():
        count = min(map(len, arms))
        for arm in (ORIGINAL, CHANGED, NULL):  # the last ones: what compiles does so early
            samples[arm] += arms[arm][len(arms[arm]) - count :]
    return samples


def _suspicion(
    blocks: Sequence[Mapping[str, Any]], comparison: Comparison, bound: float | None
) -> str:
    """Why a comparison does not count; empty if it does."""
    if bound is not None and comparison.low > bound:
        return (
            f"the measured gain {comparison.ratio:.3f} is above its bound {bound:.3f}: one of them "
            "is wrong; please report this with the JSON output"
        )
    after: dict[bool, list[float]] = {True: [], False: []}
    for before, block in pairwise(blocks):
        if block["arm"] != CHANGED and not block["compiled"]:
            after[before["arm"] == CHANGED].append(block["seconds"])
    if min(map(len, after.values())) >= 3:
        carried = median(after[True]) / median(after[False]) - 1
        quartiles = quantiles(after[True], n=4)[0], quantiles(after[False], n=4)[2]
        if carried > CARRIED and quartiles[0] > quartiles[1]:
            return (
                f"the original is {carried:.0%} slower in the blocks after the changed ones: work "
                "of the change runs in the original's time, or it takes away its caches"
            )
    return ""
