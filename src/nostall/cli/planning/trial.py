"""``nostall launch --try N``: steps of a plan and of its candidates, in turns; the fastest is kept.

A step has its optimiser here: where parameters are sharded, it updates fewer on each GPU.
A candidate is kept only if it is faster than the plan beyond the plan's difference from itself.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nostall.cli.terminal.console import err
from nostall.core.errors import BadInput, NostallError
from nostall.core.measurement import Comparison
from nostall.parallel.sharding.engine_file import CANDIDATES
from nostall.report.units import Scale

if TYPE_CHECKING:
    from nostall.parallel.execute.run_config import RunConfig, RunResult

MAX_CANDIDATES = 3
"""Those with the least modelled time, the optimiser's included."""
TURNS = 2
"""How often each plan's processes are started."""
WARM_UPS = 2
"""Steps at the start of each turn that do not count."""
Launch = Callable[["RunConfig"], "RunResult"]


TABLE = ("plan", "median", "plan / this", "95 % interval", "plan against itself", "verdict")
"""Columns of the table of trials."""


@dataclass(frozen=True)
class Trial:
    """One plan's measured steps beside those of the plan that was given."""

    name: str
    path: Path
    seconds: list[float]
    comparison: Comparison | None
    """None for the plan that was given."""

    @property
    def row(self) -> dict[str, Any]:
        """The trial as JSON values; a ratio above 1 is faster than the given plan."""
        own = self.comparison
        return {
            "plan": self.name,
            "kind": "measured",
            "median_s": statistics.median(self.seconds),
            "ratio": own.ratio if own else 1.0,
            "interval": [own.low, own.high] if own else None,
            "null": [own.null_low, own.null_high] if own else None,
            "verdict": own.verdict if own else "given",
        }


def table_rows(trials: Sequence[Trial]) -> list[tuple[str, ...]]:
    """Rows of the table of trials; the first trial is kept."""
    rows: list[tuple[str, ...]] = []
    time = Scale("s", statistics.median(trials[0].seconds))
    for trial in trials:
        own = trial.comparison
        ends = (
            (f"{own.ratio:.3f}", f"{own.low:.3f} to {own.high:.3f}",
             f"{own.null_low:.3f} to {own.null_high:.3f}") if own else ("1.000", "", "")
        )  # fmt: skip
        row = trial.row
        rows.append((trial.name, time(row["median_s"]), *ends, str(row["verdict"])))
    return rows


def listed_candidates(plan: Path) -> list[dict[str, Any]]:
    """Documents of the candidates in a plan file, those with the least modelled time.

    Raises :class:`BadInput` if it lists none.
    """
    try:
        listed = json.loads(plan.read_text(encoding="utf-8")).get(CANDIDATES) or []
    except (OSError, ValueError, AttributeError):
        listed = []
    if not listed:
        raise BadInput(
            f"{plan} lists no candidates to try; leave --try out, or give a file of nostall plan "
            "--planner sharding, which lists ddp, fsdp2 and tp beside the plan"
        )
    return sorted(listed, key=_modelled_s)[:MAX_CANDIDATES]


def _modelled_s(document: dict[str, Any]) -> float:
    return float(document["predicted_step_s"]) + float(document.get("predicted_update_s", 0.0))


def candidate_files(plan: Path, folder: Path) -> list[tuple[str, Path]]:
    """Files, in a folder, of the candidates that a plan file lists; their names before them."""
    files = []
    for document in listed_candidates(plan):
        path = folder / f"{document['planner']}.json"
        path.write_text(json.dumps(document), encoding="utf-8")
        files.append((str(document["planner"]), path))
    return files


def try_plans(
    config: RunConfig, candidates: Sequence[tuple[str, Path]], steps: int, launch: Launch
) -> list[Trial]:
    """Measure the plan of a configuration and its candidates; the fastest trial comes first.

    ``launch`` runs a configuration.  Each turn runs the plan, the candidates and the plan again.  A
    candidate that cannot run is left out, with the reason on standard error.
    """
    given, name, again = Path(config.plan), "the plan", "the plan again"
    turn = [(name, given), *candidates, (again, given)]
    seconds: dict[str, list[float]] = {label: [] for label, _ in turn}
    for number in range(TURNS):
        for label, path in turn:
            if label not in seconds:
                continue
            err.print(f"nostall: tries {label}, turn {number + 1} of {TURNS}")
            tried = replace(config, plan=str(path), steps=steps + WARM_UPS, check=False)
            try:
                seconds[label] += launch(tried).whole_seconds[WARM_UPS:]
            except NostallError as error:
                if path == given:
                    raise
                err.print(f"nostall: leaves {label} out: {error}")
                del seconds[label]
    first, null = seconds.pop(name), seconds.pop(again)
    trials, paths = [Trial(name, given, first, None)], dict(candidates)
    for label, own in seconds.items():
        comparison = Comparison.from_samples(first, own, null, kind="measured", loads=TURNS)
        trials.append(Trial(label, paths[label], own, comparison))
    return sorted(trials, key=_is_kept_before)


def _is_kept_before(trial: Trial) -> tuple[int, float]:
    """Key that puts faster candidates first, then the given plan."""
    own = trial.comparison
    if own is None:
        return 1, 1.0
    return (0 if own.verdict == "faster" else 2), -own.ratio
