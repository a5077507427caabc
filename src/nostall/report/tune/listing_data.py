"""Everything the page's script draws, as one JSON object: listings, waits, links."""

from __future__ import annotations

import re
from typing import Any

from nostall.report.tune.protections import Link, Protections, protections
from nostall.report.tune.run_data import LoadedRun
from nostall.report.tune.side_by_side import BlockLineup
from nostall.report.tune.stalls import Waits
from nostall.sass.model import Explanation
from nostall.sass.program import Function

_REUSE = re.compile(r"\.reuse\b")


def texts(function: Function) -> list[str]:
    """Each instruction's text by original index, without reuse flags: those may change."""
    by_index = sorted(function.instructions, key=lambda i: i.index)
    return [_REUSE.sub("", i.text) for i in by_index]


def page_data(run: LoadedRun, blocks: list[BlockLineup], waits: Waits | None) -> dict[str, Any]:
    """All arrays are by original index unless they say otherwise; ``order`` is by position."""
    original, candidate = run.original, run.candidate
    by_index = sorted(original.instructions, key=lambda i: i.index)
    before = _side(original, run.program.sm, waits.before if waits else None)
    after = _side(candidate, run.program.sm, waits.after if waits else None)
    for name in ("links", "waits"):
        after[name] = _difference(before[name], after[name])
    return {
        "text": texts(original),
        "pipe": [i.pipe for i in by_index],
        "fixed": [int(i.has_fixed_latency(run.program.sm)) for i in by_index],
        "pinned": [i.index for i in by_index if i.is_barrier or i.index in original.pinned],
        "reasons": list(waits.reasons) if waits else [],
        "names": ["original", run.what],
        "blocks": [_block(block, waits) for block in blocks],
        "sides": [before, after],
    }


def _difference(before: list[Any], after: list[Any]) -> dict[str, Any]:
    """``after`` as what is not in it of ``before`` (positions) and what it has besides."""
    old, new = ({tuple(item) for item in items} for items in (before, after))
    return {
        "without": [at for at, item in enumerate(before) if tuple(item) not in new],
        "added": [item for item in after if tuple(item) not in old],
    }


def _block(block: BlockLineup, waits: Waits | None) -> dict[str, Any]:
    cycles = (
        [round(float(e.cycles[block.start : block.end].sum())) for e in (waits.before, waits.after)]
        if waits
        else None
    )
    return {
        "start": block.start,
        "end": block.end,
        "succ": block.succ,
        "loops": block.loops,
        "moved": block.moved,
        "shifted": block.shifted,
        "retimed": len(block.retimed),
        "cycles": cycles,
    }


def _side(function: Function, sm: int, explanation: Explanation | None) -> dict[str, Any]:
    by_index = sorted(function.instructions, key=lambda i: i.index)
    found = protections(function, sm)
    return {
        "order": [i.index for i in function.instructions],
        "control": [str(i.control) for i in by_index],
        "reuse": [0 if i.has_batch_field else i.control.reuse for i in by_index],
        "cycles": _cycles(explanation),
        "links": [_link(link) for link in found.links],
        "waits": _waits(found),
    }


def _cycles(explanation: Explanation | None) -> list[list[int] | int]:
    """Rounded warp cycles by reason; 0 for an instruction that never issues."""
    if explanation is None:
        return []
    rounded = explanation.cycles.round().astype(int)
    return [row.tolist() if row.any() else 0 for row in rounded]


def _link(link: Link) -> list[Any]:
    return [link.first, link.second, link.kind, link.registers, *link.how]


def _waits(found: Protections) -> list[list[Any]]:
    return [[w.waiter, w.producer, w.what, w.boards] for w in found.waits]
