"""Targets of the search of the assembler's input, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import geometric_mean
from typing import Any, NamedTuple


class Target(NamedTuple):
    """A target for the geometric mean of a group of searches, or for their best."""

    title: str
    group: str
    """Title of the group of kernels (:data:`benchmarks.ptx.page.GROUPS`)."""
    is_best: bool
    over_a: float
    goal: float
    over_b: float | None


TARGETS = (
    Target("published small shapes", "published small shapes", False, 1.05, 1.09, 1.03),
    Target("their mma kernels", "their mma kernels", False, 1.08, 1.15, 1.05),
    Target("their wgmma kernels", "their wgmma kernels", False, 1.01, 1.04, 1.01),
    Target("best published kernel", "published small shapes", True, 1.13, 1.26, 1.10),
    Target("shapes that fill the GPU", "shapes that fill the GPU", False, 1.02, 1.05, None),
)
"""Required over (a), goal over (a), required over (b).

The goals for the published shapes are CuAsmRL's average and best (arXiv:2501.08071, abstract).
"""


def judged_targets(groups: Iterable[Mapping[str, Any]], chains: float) -> list[list[str]]:
    """The targets, and which are met.

    ``groups``: deployed ratios over (a) and (b), with titles; ``chains``: geometric mean of chains
    of dependent launches.
    """
    by_title = {group["title"]: group for group in groups}
    rows = []
    for target in TARGETS:
        of = max if target.is_best else geometric_mean
        over_a, over_b = (of(by_title[target.group][key]) for key in ("over_a", "over_b"))
        rows.append([
            target.title, *_judged(over_a, target.over_a), *_judged(over_a, target.goal),
            *(_judged(over_b, target.over_b) if target.over_b else ("–", "–")),
        ])  # fmt: skip
    return [
        *rows,
        ["chains back to back", *_judged(chains, 1.08), *_judged(chains, 1.15), "–", "–"],
    ]


def _judged(ratio: float, target: float) -> tuple[str, str]:
    return f"{target:.2f}", f"{'yes' if ratio >= target else 'no'}: {ratio:.3f}"
