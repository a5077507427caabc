"""JSON data of the page's script: both listings, register dependences and scoreboard waits.

Arrays are by original index, except ``order``, which is by position.
"""

from __future__ import annotations

import re
from typing import Any

from nostall.report.tune.protections import (
    Dependence,
    DependenceAnalysis,
    analyze_dependences,
)
from nostall.report.tune.run_data import RunData
from nostall.report.tune.side_by_side import BlockDiff
from nostall.report.tune.stalls import StallComparison
from nostall.sass.model import Explanation
from nostall.sass.program import Function

_REUSE_FLAG = re.compile(r"\.reuse\b")


def instruction_texts(function: Function) -> list[str]:
    """Text of each instruction by original index, without reuse flags, which may change."""
    by_index = sorted(function.instructions, key=lambda i: i.index)
    return [_REUSE_FLAG.sub("", i.text) for i in by_index]


def page_data(
    run: RunData, blocks: list[BlockDiff], stalls: StallComparison | None
) -> dict[str, Any]:
    """The data of the page.  ``sides`` are the original and the candidate.

    The candidate's dependences and waits are stored as a difference from the original's.
    """
    original, candidate, sm = run.original, run.candidate, run.program.sm
    by_index = sorted(original.instructions, key=lambda i: i.index)
    measured = bool(run.settings.get("measured_latencies"))
    before = _side(original, sm, measured, stalls.before if stalls else None)
    after = _side(candidate, sm, measured, stalls.after if stalls else None)
    for name in ("dependences", "waits"):
        after[name] = _difference(before[name], after[name])
    return {
        "text": instruction_texts(original),
        "pipe": [i.pipe for i in by_index],
        "fixed": [int(i.has_fixed_latency(sm)) for i in by_index],
        "pinned": [i.index for i in by_index if i.is_barrier or i.index in original.pinned],
        "reasons": list(stalls.reasons) if stalls else [],
        "names": ["original", run.candidate_name],
        "blocks": [_block(block, stalls) for block in blocks],
        "sides": [before, after],
    }


def _difference(before: list[Any], after: list[Any]) -> dict[str, Any]:
    """``after`` as ``removed`` positions of ``before`` and ``added`` items."""
    old, new = ({tuple(item) for item in items} for items in (before, after))
    return {
        "removed": [at for at, item in enumerate(before) if tuple(item) not in new],
        "added": [item for item in after if tuple(item) not in old],
    }


def _block(block: BlockDiff, stalls: StallComparison | None) -> dict[str, Any]:
    cycles = None
    if stalls:
        explanations = (stalls.before, stalls.after)
        cycles = [round(float(e.cycles[block.start : block.end].sum())) for e in explanations]
    return {
        "start": block.start,
        "end": block.end,
        "succ": block.successors,
        "loops": block.loops,
        "moved": block.moved,
        "shifted": block.num_shifted,
        "retimed": len(block.retimed),
        "cycles": cycles,
    }


def _side(
    function: Function, sm: int, measured: bool, explanation: Explanation | None
) -> dict[str, Any]:
    by_index = sorted(function.instructions, key=lambda i: i.index)
    analysis = analyze_dependences(function, sm, measured_latencies=measured)
    return {
        "order": [i.index for i in function.instructions],
        "control": [str(i.control) for i in by_index],
        "reuse": [0 if i.has_batch_field else i.control.reuse for i in by_index],
        "cycles": _cycles(explanation),
        "dependences": [_dependence(dependence) for dependence in analysis.dependences],
        "waits": _waits(analysis),
    }


def _cycles(explanation: Explanation | None) -> list[list[int] | int]:
    """Rounded warp cycles by reason; 0 for an instruction that never issues."""
    if explanation is None:
        return []
    rounded = explanation.cycles.round().astype(int)
    return [row.tolist() if row.any() else 0 for row in rounded]


def _dependence(dependence: Dependence) -> list[Any]:
    return [
        dependence.first,
        dependence.second,
        dependence.kind,
        dependence.registers,
        *dependence.protection,
    ]


def _waits(analysis: DependenceAnalysis) -> list[list[Any]]:
    return [[w.waiter, w.producer, w.role, w.scoreboards] for w in analysis.waits]
