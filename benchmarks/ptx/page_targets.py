"""Targets of the search of the assembler's input, beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any, NamedTuple

from benchmarks.harness.markdown import table, wrapped

Row = Mapping[str, Any]


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


def targets_section(
    ratios: Mapping[str, tuple[Sequence[float], Sequence[float]]], chains: float
) -> str:
    """Which targets are met.

    ``ratios``: deployed ratios over (a) and (b) of each group; ``chains``: geometric mean of chains
    of dependent launches.
    """
    lines = []
    for target in TARGETS:
        over_a, over_b = ratios[target.group]
        of = max if target.is_best else geometric_mean
        lines.append([
            target.title, *_judged(of(over_a), target.over_a), *_judged(of(over_a), target.goal),
            *(_judged(of(over_b), target.over_b) if target.over_b else ("–", "–")),
        ])  # fmt: skip
    lines.append(["chains back to back", *_judged(chains, 1.08), *_judged(chains, 1.15), "–", "–"])
    orders = [geometric_mean(over_b) for _, over_b in ratios.values()]
    note = wrapped(
        "Requirements and goals for geometric means, each with the measured ratio. The goals for "
        "the published shapes are CuAsmRL's average and best gain over Triton's schedules. The "
        f"order of instructions alone, over (b), gives {100 * min(orders) - 100:.1f} to "
        f"{100 * max(orders) - 100:.1f} % in these groups; the rest of a gain comes from register "
        "budgets, options and names. What more time gains: long searches, below."
    )
    head = ("kernels", "required over (a)", "met", "goal over (a)", "met", "required over (b)",
            "met")  # fmt: skip
    return f"## Targets\n\n{table(head, lines)}\n\n{note}"


def _judged(ratio: float, target: float) -> tuple[str, str]:
    return f"{target:.2f}", f"{'yes' if ratio >= target else 'no'}: {ratio:.3f}"
