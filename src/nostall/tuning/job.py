"""The main job as one readable story: program -> space -> search -> verify -> decide -> keep.

Nothing leaves this function that the verifier has not accepted: when a candidate is refused, or
nothing better was found, the original is kept.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nostall import __version__
from nostall.core import (
    BadInput,
    Budget,
    Checkpoint,
    Objective,
    Observer,
    Run,
    Search,
    SearchResult,
    Tolerance,
    Trial,
)
from nostall.core.errors import ContractBroken
from nostall.gpu import Device, Kernel, MeasurementPlan, TimingMethod
from nostall.gpu.sanitizer import SanitizerReport, sanitize
from nostall.sass import Program, Verdict, validate
from nostall.sass.binary import toolchain
from nostall.sass.model import SmModel
from nostall.sass.program import Function
from nostall.sass.safety import verify
from nostall.sass.safety.identity import rules_digest
from nostall.sass.schedule import Schedule, ScheduleSpace
from nostall.tuning.ablation import ablate
from nostall.tuning.evidence import compared_how, comparison_of, notes_on, verdict_of
from nostall.tuning.gpu_objective import Decision, MeasuredSchedules, decide, race
from nostall.tuning.resume import FINALISTS, RULES, resumed
from nostall.tuning.source import Source
from nostall.tuning.strategies import LEARNING
from nostall.tuning.verified_checkpoints import JudgedCheckpoints


@dataclass(frozen=True)
class Settings:
    """What a tuning run was asked to do; goes into ``run.json``."""

    strategy: str = "anneal"
    seed: int = 0
    seconds: float | None = None
    evaluations: int | None = None
    assumed_trips: int = 8
    objective: str = "model"
    rounds: int = 200
    checks: int = 16
    workers: int | None = None
    clock: TimingMethod = "graph"
    cold: bool = False
    tolerance: Tolerance | None = None
    sanitizer: bool = False
    policy: Path | None = None

    @property
    def budget(self) -> Budget:
        return Budget(self.seconds, self.evaluations)

    @property
    def plan(self) -> MeasurementPlan:
        """How a device is to check and time."""
        return MeasurementPlan(
            cold=self.cold, clock=self.clock, tolerance=self.tolerance, seed=self.seed
        )


@dataclass(frozen=True)
class Tuned:
    """What a tuning run found.  ``cubin`` is the original's bytes when nothing better was found;
    ``decision`` is the fresh measurement of the winner, when a GPU was asked."""

    cubin: bytes
    search: SearchResult[Schedule]
    verdict: Verdict
    improved: bool
    moved: int
    retimed: int
    path: Path | None
    decision: Decision | None = None
    sanitized: Mapping[str, SanitizerReport] = field(default_factory=dict[str, SanitizerReport])

    @property
    def ratio(self) -> float:
        """Original / result in the objective's unit; 1.0 when the original was kept."""
        if not self.improved:
            return 1.0
        if self.decision is not None and self.decision.comparison is not None:
            return self.decision.comparison.ratio
        return self.search.ratio


def tune(
    source: Source,
    search: Search,
    settings: Settings,
    *,
    run: Run | None = None,
    observers: Sequence[Observer] = (),
    resume: bool = False,
    objective: Callable[[Program, ScheduleSpace], Objective[Schedule]] | None = None,
    device: Device | None = None,
    make_space: Callable[[Program, Function], ScheduleSpace] = ScheduleSpace,
) -> Tuned:
    """Search for a better schedule of ``source.kernel`` and prove it safe.

    With a ``device`` candidates are measured, and the winner replaces the original only when a
    fresh process finds it faster beyond the noise of the original against itself.  ``make_space``:
    other moves than the usual ones; the verifier has the last word on what they lead to.

    Raises :class:`BadInput` when the original itself cannot be judged, and
    :class:`ContractBroken` when the verifier refuses what the search built (a bug of nostall; the
    refused cubin is kept in the run directory).
    """
    program = Program.from_cubin(source.cubin)
    function = program.kernel(source.kernel)
    _judge_original(source.cubin, function.name)
    space = make_space(program, function)
    flops = source.launch.flops if source.launch else None
    measured = MeasuredSchedules(space, device, flops) if device is not None else None
    cost = measured or (
        objective(program, space) if objective else _model(program, source, settings)
    )
    if run is not None:
        run.write("original.cubin", source.cubin)

    def judge(state: str) -> Verdict:
        return verify(source.cubin, space.impose(space.load(state)).to_cubin())

    found = search.run(
        space,
        cost,
        settings.budget,
        seed=settings.seed,
        observers=[*observers, *_judged(search, space, source, run), *_kept_in(run, measured)],
        resume=resumed(run, measured, judge) if resume else None,
    )
    best = found.best
    if measured is not None:
        best = (race(measured, measured.finalists()) or [space.start()])[0]
    candidate = space.impose(best).to_cubin()
    verdict = _verified(source, candidate, run)
    decision = None
    if device is not None:
        decision = decide(device, candidate, settings.rounds, settings.checks, settings.seed)
    better = decision.faster if decision is not None else found.ratio > 1.0
    improved = better and candidate != source.cubin
    sanitized = _sanitized(source, candidate, settings) if improved else {}
    improved = improved and all(said.answer != "errors" for said in sanitized.values())
    moved, retimed = _difference(space.start(), best) if improved else (0, 0)
    tuned = Tuned(
        cubin=candidate if improved else source.cubin,
        search=found,
        verdict=verdict,
        improved=improved,
        moved=moved,
        retimed=retimed,
        path=run.path if run is not None else None,
        decision=decision,
        sanitized=sanitized,
    )
    if run is not None:
        _keep(run, source, settings, program, tuned, measured)
        if improved:
            _explain(run, space, cost, best, found.start_measurement.value)
    return tuned


def _sanitized(
    source: Source, candidate: bytes, settings: Settings
) -> Mapping[str, SanitizerReport]:
    """What compute-sanitizer says of the winner, where it was asked for."""
    if not settings.sanitizer or source.launch is None:
        return {}
    kernel = Kernel(source.cubin, source.kernel, source.launch)
    return sanitize(kernel, candidate, settings.plan)


def _explain(
    run: Run,
    space: ScheduleSpace,
    objective: Objective[Schedule],
    best: Schedule,
    start: float,
) -> None:
    """Keep what carried the gain, beside a result that is kept already: Ctrl-C only ends this."""
    with suppress(KeyboardInterrupt):
        parts = ablate(space, objective, best, start)
        run.write("ablation.json", json.dumps(parts.to_json(), indent=1).encode())


def _judged(
    search: Search, space: ScheduleSpace, source: Source, run: Run | None
) -> list[Observer]:
    """What judges a learning strategy's checkpoints, before they are written."""
    if getattr(search, "name", "") not in LEARNING:
        return []
    return [JudgedCheckpoints(space, lambda candidate: _verified(source, candidate, run))]


def _verified(source: Source, candidate: bytes, run: Run | None) -> Verdict:
    """The verdict on what the search built; it must be safe."""
    verdict = verify(source.cubin, candidate)
    if verdict.safe:
        return verdict
    if run is not None:
        run.write("refused.cubin", candidate)
        run.finish("failed", {"verdict": verdict_of(verdict)})
    raise ContractBroken(
        f"the verifier refuses the schedule that the search built: {verdict.findings[0]}; the "
        "original is kept; please report this with the run directory"
    )


def describe(source: Source, settings: Settings) -> dict[str, Any]:
    """The settings as they go into ``run.json``."""
    return {
        "kernel": source.kernel,
        "origin": source.origin,
        "original_sha256": hashlib.sha256(source.cubin).hexdigest(),
        RULES: rules_digest(),
        "objective": settings.objective,
        "strategy": settings.strategy,
        "seed": settings.seed,
        "seconds": settings.seconds,
        "evaluations": settings.evaluations,
        "assumed_trips": settings.assumed_trips,
        "workers": settings.workers,
        "rounds": settings.rounds,
        "checks": settings.checks,
        "clock": settings.clock,
        "cold": settings.cold,
        "tolerance": settings.tolerance.model_dump() if settings.tolerance else None,
        "sanitizer": settings.sanitizer,
        "policy": settings.policy.name if settings.policy else None,
        "launch": source.launch.model_dump(mode="json") if source.launch else None,
        "provenance": dict(source.provenance),
    }


def _judge_original(data: bytes, kernel: str) -> None:
    findings = [f for f in validate(data).findings if f.function == kernel]
    if findings:
        raise BadInput(
            f"kernel {kernel!r} cannot be tuned: nostall's rules do not hold for the original "
            f"already ({len(findings)} findings, first: {findings[0]}); `nostall inspect` lists "
            "them"
        )


def _model(program: Program, source: Source, settings: Settings) -> SmModel:
    if source.launch is None:
        raise BadInput(
            f"{source.origin}: the SM model needs to know how {source.kernel!r} is launched; give "
            "--launch spec.toml (grid, block, shared, ...)"
        )
    function = program.kernel(source.kernel)
    return SmModel(program, function, source.launch, assumed_trips=settings.assumed_trips)


class _Finalists:
    """Observer that keeps the finalists of a measured search beside its checkpoints."""

    def __init__(self, run: Run, measured: MeasuredSchedules) -> None:
        self.run, self.measured = run, measured

    def on_trial(self, trial: Trial) -> None:
        """Nothing to keep."""

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.run.write(FINALISTS, json.dumps(self.measured.saved()).encode())


def _kept_in(run: Run | None, measured: MeasuredSchedules | None) -> list[Observer]:
    """Observers that write the run directory.

    Finalists first: those of a later time than the checkpoint are met again after a resume, those
    of an earlier time would be lost.
    """
    if run is None:
        return []
    return [run] if measured is None else [_Finalists(run, measured), run]


def _difference(before: Schedule, after: Schedule) -> tuple[int, int]:
    """(instructions at another position, instructions with another control word)."""
    moved = int((before.order != after.order).sum())
    changed = sum(
        (a != b).astype(int) for a, b in zip(before.arrays()[1:], after.arrays()[1:], strict=True)
    )
    return moved, int((changed > 0).sum())


def _keep(
    run: Run,
    source: Source,
    settings: Settings,
    program: Program,
    tuned: Tuned,
    measured: MeasuredSchedules | None,
) -> None:
    run.write("best.cubin", tuned.cubin)
    run.write(
        "provenance.json",
        json.dumps(_provenance(source, program, settings, tuned), indent=1).encode(),
    )
    found = tuned.search
    result: dict[str, Any] = {
        "kind": found.best_measurement.kind,
        "unit": found.best_measurement.unit,
        "original": found.start_measurement.value,
        "best": found.start_measurement.value / tuned.ratio,
        "ratio": tuned.ratio,
        "improved": tuned.improved,
        "moved": tuned.moved,
        "retimed": tuned.retimed,
        "evaluations": found.evaluations,
        "rejected": found.rejected,
        "seconds": found.seconds,
        "stopped": found.stopped,
        "verdict": verdict_of(tuned.verdict),
        "model": dict(found.start_measurement.provenance),
    }
    if measured is not None and tuned.decision is not None:
        how = compared_how(settings.checks, settings.tolerance)
        result |= {
            "comparison": comparison_of(tuned.decision) | how,
            "fates": dict(measured.fates),
            "spent": {part: round(s, 3) for part, s in measured.spent.items()},
            "faults": measured.faults[:100],
            "sanitizer": {tool: vars(said) for tool, said in tuned.sanitized.items()} or None,
        }
    run.finish("interrupted" if found.stopped == "interrupted" else "done", result)


def _provenance(
    source: Source, program: Program, settings: Settings, tuned: Tuned
) -> Mapping[str, Any]:
    """Everything needed to know what the optimised bytes are and where they came from."""
    kind = tuned.search.best_measurement.kind
    how = compared_how(settings.checks, settings.tolerance)
    return {
        "nostall": __version__,
        "python": platform.python_version(),
        "nvdisasm": toolchain.version("nvdisasm"),
        "kernel": source.kernel,
        "origin": source.origin,
        "architecture": f"sm_{program.sm}",
        "original_sha256": hashlib.sha256(source.cubin).hexdigest(),
        "best_sha256": hashlib.sha256(tuned.cubin).hexdigest(),
        "source": dict(source.provenance),
        "verified": verdict_of(tuned.verdict),
        "compared": how if tuned.decision is not None else None,
        "gain": {"kind": kind, "ratio": tuned.ratio},
        "notes": notes_on(program.sm, kind),
    }
