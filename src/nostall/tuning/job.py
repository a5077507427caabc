"""Job of ``nostall tune``: search schedules of a kernel, verify, compare and record the best one.

Only a cubin that the verifier accepts can be the result.  If a candidate is unsafe, or if nothing
better is found, the result is the original.

Resume a run: load its checkpoint and finalists, and verify them if the rules have changed.

Verify the checkpoints of a learning strategy during the search, not only its result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any

from nostall.core import (
    BadInput,
    BadRun,
    Checkpoint,
    Objective,
    Observer,
    Run,
    Search,
    SearchResult,
    Trial,
)
from nostall.core.errors import ContractBroken
from nostall.core.validation import parse_json
from nostall.gpu import Device, Kernel
from nostall.gpu.sanitizer import SanitizerReport, sanitize
from nostall.sass import Program, Verdict, validate
from nostall.sass.model import SmModel
from nostall.sass.program import Function
from nostall.sass.safety import verify
from nostall.sass.safety.verdict import rules_digest
from nostall.sass.schedule import Schedule, ScheduleSpace
from nostall.tuning.ablation import ablate
from nostall.tuning.distance_check import are_measured, check_distances
from nostall.tuning.gpu_objective import Decision, GpuObjective, decide, race_states
from nostall.tuning.nominal_work import SIP, nominal_flops, strategy_name
from nostall.tuning.records.recipe_file import DependentResult, RecipeFile
from nostall.tuning.records.result_records import provenance_record, result_record, verdict_record
from nostall.tuning.settings import UNSAFE_CUBIN_FILE, Settings
from nostall.tuning.sources.source import Source, missing_launch
from nostall.tuning.strategies import LEARNING_STRATEGIES

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


_MAX_TIME_SHARE = 0.1
"""Share of the search time that verification may take."""


class CheckpointVerifier:
    """Observer that verifies the best schedule of a checkpoint before the checkpoint is written.

    A schedule that comes too soon after the last verification, given the time share, is skipped; a
    later checkpoint or the result is verified.
    """

    def __init__(self, space: ScheduleSpace, verify: Callable[[bytes], object]) -> None:
        """``verify`` raises an exception for an unsafe cubin, which ends the search."""
        self.space, self.verify = space, verify
        self._last_verified = space.dump(space.start())
        self._next_time = monotonic()

    def on_trial(self, trial: Trial) -> None:
        """Do nothing."""

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Verify the best schedule if it is new and if the time share allows it."""
        start = monotonic()
        if checkpoint.best == self._last_verified or start < self._next_time:
            return
        self.verify(self.space.impose(self.space.load(checkpoint.best)).to_cubin())
        self._last_verified = checkpoint.best
        end = monotonic()
        self._next_time = end + (end - start) * (1 / _MAX_TIME_SHARE - 1)


MakeSpace = Callable[[Program, Function], ScheduleSpace]


@dataclass(frozen=True)
class TuningResult:
    """Result of a tuning run."""

    cubin: bytes
    """The best cubin; the original's bytes if nothing better was found."""
    search: SearchResult[Any]
    verdict: Verdict
    """Verdict of the verifier on the candidate."""
    improved: bool
    """Whether the candidate replaces the original."""
    num_moved: int
    """Instructions at another position than in the original."""
    num_retimed: int
    """Instructions with another control word than in the original."""
    decision: Decision | None = None
    """The final comparison on a GPU; None for a modelled objective."""
    sanitizer_reports: Mapping[str, SanitizerReport] = field(
        default_factory=dict[str, SanitizerReport]
    )
    """Report of each tool of compute-sanitizer; empty if it did not run."""
    recipe: RecipeFile | None = None
    """How the cubin is made again, if it was assembled from PTX."""
    dependent: DependentResult | None = None
    """The result for dependent launches; None if they were not tried, or none could be built."""

    @property
    def ratio(self) -> float:
        """Time of the original / time of the result; 1.0 if the original is the result."""
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
    device: Device | None = None,
    make_space: MakeSpace | None = None,
) -> TuningResult:
    """Search for a faster schedule of ``source.kernel`` and verify it.

    With a ``device``, candidates are measured; the winner replaces the original only if a fresh
    process measures it as faster beyond the noise of the original against itself.  Without one, the
    SM model evaluates candidates.  ``run`` is the run directory to write, ``resume`` continues from
    its last checkpoint.  ``make_space`` builds the search space (default: a ScheduleSpace); the
    verifier checks the result of any space.

    Raises :class:`BadInput` if the verifier rejects the original, and :class:`ContractBroken` if it
    rejects the candidate (a bug of nostall; the run directory keeps the unsafe cubin).
    """
    job = _TuningJob(source, settings, run, device, make_space)
    search_result = job.search(search, observers, resume)
    best = job.best_schedule(search_result)
    result = job.evaluate(search_result, best)
    job.record(result, best)
    return result


class _TuningJob:
    """The stages of a tuning run."""

    def __init__(
        self,
        source: Source,
        settings: Settings,
        run: Run | None,
        device: Device | None,
        make_space: MakeSpace | None,
    ) -> None:
        self.source, self.settings, self.run, self.device = source, settings, run, device
        self.program = Program.from_cubin(source.cubin)
        function = self.program.kernel(source.kernel)
        _check_original(source.cubin, function.name)
        if make_space is None:
            make_space = partial(ScheduleSpace, measured_latencies=settings.measured_latencies)
        self.space = make_space(self.program, function)
        self.measured: GpuObjective | None = None
        self.objective: Objective[Schedule]
        if device is None:
            self.objective = _make_sm_model(self.program, source, settings)
        else:
            flops = source.launch.flops if source.launch else None
            self.objective = self.measured = GpuObjective(self.space, device, flops)
        if run is not None:
            run.write("original.cubin", source.cubin)

    def search(
        self, search: Search, observers: Sequence[Observer], resume: bool
    ) -> SearchResult[Schedule]:
        """Run the search, from the last checkpoint if ``resume``.

        Raises :class:`UnsupportedArchitecture` if the distances of the latency table do not hold.
        """
        if self.device is not None and not are_measured(self.source.cubin):
            check_distances(self.space, self.device)
        checkpoint = (
            load_checkpoint(self.run, self.measured, self._verify_state) if resume else None
        )
        if self.objective.flops is None and strategy_name(search) == SIP:
            self.objective.flops = nominal_flops(self.objective, self.space.start())
        verifiers = []
        if getattr(search, "name", "") in LEARNING_STRATEGIES:
            verifiers.append(CheckpointVerifier(self.space, self._verify))
        return search.run(
            self.space,
            self.objective,
            self.settings.budget,
            seed=self.settings.seed,
            observers=[*observers, *verifiers, *self._run_observers()],
            resume=checkpoint,
        )

    def best_schedule(self, search_result: SearchResult[Schedule]) -> Schedule:
        """The best schedule; the winner of a race of the finalists if they are measured."""
        if self.measured is None:
            return search_result.best
        ranked = race_states(self.measured, self.measured.finalists())
        return ranked[0] if ranked else self.space.start()

    def evaluate(self, search_result: SearchResult[Schedule], best: Schedule) -> TuningResult:
        """Verify the best schedule and decide whether it replaces the original."""
        source, settings = self.source, self.settings
        candidate = self.space.impose(best).to_cubin()
        verdict = self._verify(candidate)
        decision = None
        if self.device is not None:
            decision = decide(
                self.device, candidate, settings.rounds, settings.checks, settings.seed
            )
        is_faster = decision.faster if decision is not None else search_result.ratio > 1.0
        improved = is_faster and candidate != source.cubin
        reports = run_sanitizer(source, settings, candidate) if improved else {}
        improved = improved and all(report.answer != "errors" for report in reports.values())
        start = self.space.start()
        num_moved, num_retimed = _count_differences(start, best) if improved else (0, 0)
        return TuningResult(
            cubin=candidate if improved else source.cubin,
            search=search_result,
            verdict=verdict,
            improved=improved,
            num_moved=num_moved,
            num_retimed=num_retimed,
            decision=decision,
            sanitizer_reports=reports,
        )

    def record(self, result: TuningResult, best: Schedule) -> None:
        """Write the result to the run directory, then the ablation of an improvement."""
        if self.run is None:
            return
        self.run.write("best.cubin", result.cubin)
        provenance = provenance_record(self.source, self.program.sm, self.settings, result)
        self.run.write("provenance.json", json.dumps(provenance, indent=1).encode())
        interrupted = result.search.stopped == "interrupted"
        record = result_record(result, self.settings, self.measured)
        self.run.finish("interrupted" if interrupted else "done", record)
        if result.improved:
            with suppress(KeyboardInterrupt):  # the result is complete without the ablation
                start_value = result.search.start_measurement.value
                ablation = ablate(self.space, self.objective, best, start_value)
                self.run.write("ablation.json", json.dumps(ablation.to_json(), indent=1).encode())

    def _run_observers(self) -> list[Observer]:
        """Observers that write the run directory: the finalists, then the checkpoint.

        After a kill between the two writes, the finalists are newer than the checkpoint, and the
        resumed search finds them again.  Finalists older than the checkpoint would be incomplete.
        """
        if self.run is None:
            return []
        if self.measured is None:
            return [self.run]
        return [_FinalistWriter(self.run, self.measured), self.run]

    def _verify_state(self, state: str) -> Verdict:
        """The verdict on a schedule in the form of :meth:`Space.dump`."""
        return self._verdict(self.space.impose(self.space.load(state)).to_cubin())

    def _verdict(self, candidate: bytes) -> Verdict:
        measured = self.settings.measured_latencies
        return verify(self.source.cubin, candidate, measured_latencies=measured)

    def _verify(self, candidate: bytes) -> Verdict:
        """The verdict on a cubin of the search; raises :class:`ContractBroken` if it is unsafe."""
        verdict = self._verdict(candidate)
        if verdict.safe:
            return verdict
        if self.run is not None:
            self.run.write(UNSAFE_CUBIN_FILE, candidate)
            self.run.finish("failed", {"verdict": verdict_record(verdict)})
        raise ContractBroken(
            f"the verifier rejects the schedule that the search found: {verdict.findings[0]}; the "
            "result is the original; please report this bug with the run directory"
        )


class _FinalistWriter:
    """Observer that writes the finalists of a measured search at each checkpoint."""

    def __init__(self, run: Run, objective: GpuObjective) -> None:
        self.run, self.objective = run, objective

    def on_trial(self, trial: Trial) -> None:
        """Do nothing."""

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        self.run.write(FINALISTS_FILE, json.dumps(self.objective.snapshot()).encode())


def run_sanitizer(
    source: Source, settings: Settings, candidate: bytes
) -> Mapping[str, SanitizerReport]:
    """Reports of compute-sanitizer on the candidate, if the settings require them."""
    if not settings.sanitizer or source.launch is None:
        return {}
    kernel = Kernel(source.cubin, source.kernel, source.launch)
    return sanitize(kernel, candidate, settings.measurement_plan)


def describe(source: Source, settings: Settings) -> dict[str, Any]:
    """The source and the settings as recorded in ``run.json``."""
    return {
        "kernel": source.kernel,
        "origin": source.origin,
        "original_sha256": hashlib.sha256(source.cubin).hexdigest(),
        RULES_KEY: rules_digest(),
        **settings.record(),
        "launch": source.launch.model_dump(mode="json") if source.launch else None,
        "provenance": dict(source.provenance),
    }


def _check_original(data: bytes, kernel: str) -> None:
    """Raise :class:`BadInput` if the verifier rejects the original kernel."""
    findings = [f for f in validate(data).findings if f.function == kernel]
    if findings:
        raise BadInput(
            f"kernel {kernel!r} cannot be tuned: the verifier rejects the original "
            f"({len(findings)} findings, first: {findings[0]}); `nostall inspect` lists them"
        )


def _make_sm_model(program: Program, source: Source, settings: Settings) -> SmModel:
    if source.launch is None:
        raise missing_launch(source, "the SM model")
    function = program.kernel(source.kernel)
    return SmModel(program, function, source.launch, assumed_trips=settings.assumed_trips)


def _count_differences(original: Schedule, schedule: Schedule) -> tuple[int, int]:
    """Number of instructions at another position, and number with another control word."""
    num_moved = int((original.order != schedule.order).sum())
    changed = sum(
        (a != b).astype(int)
        for a, b in zip(original.arrays()[1:], schedule.arrays()[1:], strict=True)
    )
    return num_moved, int((changed > 0).sum())
