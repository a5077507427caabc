"""Resume a run: load its checkpoint and finalists, and verify them if the rules have changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nostall.core import BadRun, Checkpoint, Run
from nostall.core.validation import parse_json
from nostall.sass import Verdict
from nostall.sass.safety.identity import rules_digest
from nostall.tuning.gpu_objective import GpuObjective

FINALISTS_FILE = "finalists.json"
RULES_KEY = "rules"
"""Setting of a run: the digest of the verifier's rules that the run started with."""
VerifyState = Callable[[str], Verdict]
"""Verifies a schedule, given as the text of :meth:`Space.dump`."""


def load_checkpoint(
    run: Run | None, objective: GpuObjective | None, verify: VerifyState
) -> Checkpoint | None:
    """The last checkpoint of a run, or None before its first one (the search then starts anew).

    Finalists of a measured run are restored into ``objective``.  If the verifier's rules and tables
    have changed since the run started, all schedules are verified again: unsafe finalists are
    dropped.  Raises :class:`BadRun` if there is no run, if one of its files cannot be used, or if
    the current or the best schedule is unsafe now.
    """
    if run is None:
        raise BadRun("there is no run to resume; give the directory of an earlier run")
    checkpoint = run.checkpoint()
    if checkpoint is None:
        return None
    rules_changed = run.record.settings.get(RULES_KEY) != rules_digest()
    if rules_changed:
        _verify_checkpoint(run, checkpoint, verify)
    path = run.path / FINALISTS_FILE
    if objective is not None and path.exists():
        try:
            snapshot: dict[str, Any] = parse_json(path.read_text())
            if rules_changed:
                finalists = snapshot["finalists"]
                safe = [[value, state] for value, state in finalists if verify(state).safe]
                snapshot = {**snapshot, "finalists": safe}
            objective.restore(snapshot)
        except (ValueError, KeyError, TypeError) as error:
            raise BadRun(f"{path} cannot be used ({error}); start a new run") from error
    return checkpoint


def _verify_checkpoint(run: Run, checkpoint: Checkpoint, verify: VerifyState) -> None:
    for name, state in (("current", checkpoint.current), ("best", checkpoint.best)):
        verdict = verify(state)
        if not verdict.safe:
            raise BadRun(
                f"{run.path}: the verifier rejects the {name} schedule of this run "
                f"({verdict.findings[0]}), because its rules have changed since the run started; "
                "start a new run in another directory"
            )
