"""Records that were measured alone: kept only if the whole program's step is faster with them.

Launches back to back find their inputs in the L2 cache, which other kernels of a program overwrite,
so that a binary can be faster alone and slower in the program.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from nostall.optimizing.diagnosis import NATIVE
from nostall.optimizing.job import Options, optimize
from nostall.store import Row, Store

MINUTES = 3.0
"""For the proof."""


@dataclass(frozen=True)
class Kept:
    """What is left of the records of a run."""

    records: tuple[str, ...]
    """Ids of those that stay in the store."""
    reason: str
    """How the program's step gained by them, or why it did not; empty if none was to be proven."""
    others: int
    """Records of configurations that the program's autotuner did not choose, which were removed."""


def keep_proven(
    command: Sequence[str], rows: Sequence[Row], own: Collection[str], say: Callable[[str], None]
) -> Kept:
    """Remove those of ``rows`` from the store that are not proven in the program ``command``.

    ``own``: sha256 of the binaries that the program launches.  A record of another configuration of
    its autotuner is removed, too: with it the autotuner could choose otherwise, by the time of
    launches alone.  The program is started once more, and its steps with and without the records
    take turns in one process.
    """
    store = Store()
    others = [row for row in rows if row.original not in own]
    for row in others:
        store.remove(row)
    rows = [row for row in rows if row.original in own]
    if not rows:
        return Kept((), "", len(others))
    begin = time.monotonic()
    result = optimize(command, Options(MINUTES, stored_only=True, quiet_output=True), say)
    tried = next((a for a in result.attempts if a.level.name == NATIVE), None)
    say(f"whole program: {time.monotonic() - begin:.0f} s")
    used = {k["record"] for k in tried.kernels} if tried and tried.outcome == "kept" else set()
    for row in rows:
        if row.id not in used:
            store.remove(row)
    reason = tried.reason if tried else "; ".join(result.notes) or "its step was not measured"
    return Kept(tuple(row.id for row in rows if row.id in used), reason, len(others))
