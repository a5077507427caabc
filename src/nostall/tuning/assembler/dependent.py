"""Last stage with ``--pdl``: waits of dependent launches in the winner, measured in chains.

The figures are those of launches back to back and are never mixed with those of the search.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np

from nostall.gpu import Device, Kernel, MeasurementPlan
from nostall.ptx.assemble.builder import BuildSpec
from nostall.ptx.schedule.state import DependentLaunch, PtxState
from nostall.tuning.assembler.candidate import Candidate
from nostall.tuning.assembler.description import describe_levers
from nostall.tuning.assembler.objective import AssemblerObjective
from nostall.tuning.assembler.recipes.recipe import make_recipe
from nostall.tuning.assembler.recipes.reverify import kernel_verdict
from nostall.tuning.gpu_objective import decide
from nostall.tuning.records.recipe_file import DependentResult
from nostall.tuning.records.result_records import comparison_record, verdict_record
from nostall.tuning.settings import Settings

OpenDevice = Callable[[Kernel, MeasurementPlan], AbstractContextManager[Device]]

MODES: Mapping[str, tuple[DependentLaunch, ...]] = {
    "wait": ("wait",),
    "trigger": ("wait", "wait+trigger", "trigger+wait"),
}
"""Values of ``--pdl``: what may be inserted."""
_CHAIN_TIMING: dict[str, Any] = {"batch_us": 400.0, "rounds": 15, "dependent_launch": True}
"""Long samples, because the first launch of a sample is not dependent."""
_SAMPLES = 3
"""Measurements of each variant, each with a module load of its own."""


def tune_chain(
    kernel: Kernel,
    objective: AssemblerObjective,
    settings: Settings,
    states: Sequence[PtxState],
    isolated: bytes | None,
    spec: BuildSpec,
    open_device: OpenDevice,
) -> DependentResult | None:
    """Insert waits into ``states`` and compare the fastest in chains of launches.

    ``isolated``: the cubin of the search's result, None if that is the original.  Returns None if
    no variant can be built, is safe and computes what the original does.
    """
    modes = MODES[settings.pdl]
    wanted = [replace(state, dependent_launch=mode) for state in states for mode in modes]
    built = [c for c in objective.prepare(list(dict.fromkeys(wanted))) if c.cubin]
    safe = objective.safe_states([candidate.state for candidate in built])
    candidates = [objective.candidate(state) for state in safe]
    plan = replace(settings.measurement_plan, **_CHAIN_TIMING)
    with open_device(kernel, plan) as device:
        best = _fastest(device, candidates)
        if best is None:
            return None
        decision = decide(device, best.cubin, settings.rounds, settings.checks, settings.seed)
    over_isolated = None
    if isolated is not None:
        with open_device(replace(kernel, cubin=isolated), plan) as device:
            over_isolated = decide(
                device, best.cubin, settings.rounds, settings.checks, settings.seed
            )
    return DependentResult(
        best.cubin,
        make_recipe(spec, best),
        kernel_verdict(best.cubin, kernel.name),
        best.state.dependent_launch,
        tuple(describe_levers(best.state)),
        decision,
        over_isolated,
    )


def _fastest(device: Device, candidates: Sequence[Candidate]) -> Candidate | None:
    """The candidate with the largest median ratio; None if none was timed."""
    ratios: list[tuple[float, int]] = []
    for number, candidate in enumerate(candidates):
        outcomes = [device.evaluate(candidate.cubin) for _ in range(_SAMPLES)]
        timings = [outcome.timing for outcome in outcomes if outcome.timing is not None]
        if len(timings) == _SAMPLES:
            found = [np.asarray(t.original) / np.asarray(t.candidate) for t in timings]
            ratios.append((float(np.median(np.concatenate(found))), number))
    return candidates[max(ratios)[1]] if ratios else None


def dependent_record(result: DependentResult) -> dict[str, Any]:
    """The stage's result as recorded in ``run.json``."""
    isolated = result.over_isolated
    return {
        "improved": result.improved,
        "mode": result.mode,
        "levers": list(result.levers),
        "verdict": verdict_record(result.verdict),
        "chain": comparison_record(result.decision),
        "over_isolated": None if isolated is None else comparison_record(isolated),
    }
