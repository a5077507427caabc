"""Where an earlier run stood, judged by the rules of today."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from nostall.core import BadRun, Checkpoint, Run
from nostall.sass import Verdict
from nostall.sass.safety.identity import rules_digest
from nostall.tuning.gpu_objective import MeasuredSchedules

FINALISTS = "finalists.json"
RULES = "rules"
"""The setting of a run that names the rules it was begun with."""
Judge = Callable[[str], Verdict]
"""The verifier's word on a schedule, as a space dumps it."""


def resumed(run: Run | None, measured: MeasuredSchedules | None, judge: Judge) -> Checkpoint | None:
    """Where a run stood when it ended or was killed; None (start anew) before its first checkpoint.

    Where rules and tables of the verifier have changed since, they may have become stricter:
    finalists that it refuses now are forgotten.  Raises :class:`BadRun` when there is no run, when
    its files are not what a run writes, or when the search stood at a schedule that is refused now.
    """
    if run is None:
        raise BadRun("there is no run directory to resume; give the one of an earlier run")
    checkpoint = run.checkpoint()
    if checkpoint is None:
        return None
    changed = run.record.settings.get(RULES) != rules_digest()
    stood = {"present": checkpoint.current, "best": checkpoint.best} if changed else {}
    for name, state in stood.items():
        verdict = judge(state)
        if not verdict.safe:
            raise BadRun(
                f"{run.path}: the {name} schedule of this run is refused by the verifier as it is "
                f"now ({verdict.findings[0]}), so the run was made with other rules; start the run "
                "anew in another directory"
            )
    path = run.path / FINALISTS
    if measured is not None and path.exists():
        try:
            saved: dict[str, Any] = json.loads(path.read_text())
            if changed:
                kept = [[value, state] for value, state in saved["finalists"] if judge(state).safe]
                saved = {**saved, "finalists": kept}
            measured.restore(saved)
        except (ValueError, KeyError, TypeError) as error:
            raise BadRun(f"{path} cannot be used ({error}); start the run anew") from error
    return checkpoint
