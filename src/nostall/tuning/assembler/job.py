"""Job of ``--strategy assembler``: search what ptxas is given, verify, measure and record.

Portfolio of the assembler search: kernel name, register budgets, options, versions, hints.

Last phase of the assembler search: move native instructions of the winner.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from nostall.core import BadInput, Budget, LaunchSpec, Observer, Run, Search, SearchResult
from nostall.core.errors import ContractBroken, UnsupportedArchitecture
from nostall.gpu import Device, Kernel, LocalGpu
from nostall.ptx.assemble.builder import Builder, BuildSpec
from nostall.ptx.assemble.pool import BuildPool
from nostall.ptx.assemble.versions import Assembler, find_assemblers
from nostall.ptx.schedule.levers import Levers
from nostall.ptx.schedule.state import PtxState
from nostall.sass import Program, verify
from nostall.sass.schedule import ScheduleSpace
from nostall.search.orders.random_orders import best_of_portfolio, finalists
from nostall.tuning.assembler.ablation import ablate
from nostall.tuning.assembler.candidate import Candidate, build_proposal
from nostall.tuning.assembler.candidate_log import CANDIDATES_FILE, CandidateLog
from nostall.tuning.assembler.commands import CompilerCommand, find_command
from nostall.tuning.assembler.dependent import OpenDevice, dependent_record, tune_chain
from nostall.tuning.assembler.description import describe_levers, describe_resources, read_lineage
from nostall.tuning.assembler.objective import AssemblerObjective, Workers, idle_share
from nostall.tuning.assembler.proof import make_check
from nostall.tuning.assembler.recipes.recipe import Recipe, make_recipe
from nostall.tuning.assembler.recipes.reverify import kernel_verdict
from nostall.tuning.assembler.space import AssemblerSpace, make_space
from nostall.tuning.distance_check import are_measured, check_distances
from nostall.tuning.gpu_objective import GpuObjective, decide, race_states
from nostall.tuning.job import TuningResult, run_sanitizer
from nostall.tuning.nominal_work import SIP, nominal_flops, strategy_name
from nostall.tuning.records.recipe_file import DependentResult
from nostall.tuning.records.result_records import provenance_record, result_record, verdict_record
from nostall.tuning.settings import (
    DEPENDENT_CUBIN_FILE,
    DEPENDENT_RECIPE_FILE,
    PTX_FILE,
    RECIPE_FILE,
    UNSAFE_CUBIN_FILE,
    Settings,
)
from nostall.tuning.sources.source import Source
from nostall.tuning.strategies import make_strategy

NAME_PREFIX = "cutlass_"
"""Start of a kernel's name for which ptxas schedules matrix instructions in another way."""
OPTIONS: tuple[tuple[str, ...], ...] = (
    *((f"--register-usage-level={level}",) for level in range(11)),
    ("--opt-level=1",),
    ("--opt-level=2",),
    ("--disable-optimizer-constants",),
)
"""Options of ptxas that change registers or order; none changes what a load or store does."""
_REGISTER_FILE = 65536
"""32-bit registers of an SM, on all supported architectures."""
_MAX_BLOCKS = 16
"""Blocks an SM for which a budget is tried."""
_MAX_REGISTERS, _MIN_REGISTERS = 255, 16
_ALLOCATION_UNIT = 8
"""Registers a thread come in multiples of this."""
_LEAST_PART = 0.6
"""Smallest budget, as a part of the original's registers; less only spills."""
_STEPS_UP = 5
"""Budgets in steps of the allocation unit that do not limit the original."""
_LARGE_BUDGETS = (200, _MAX_REGISTERS)


def make_levers(
    kernel: str,
    registers: int,
    launch: LaunchSpec | None,
    assemblers: Sequence[Assembler],
) -> Levers:
    """The settings that a search of ``kernel`` may change.

    ``registers``: those of a thread of the original.  ``assemblers``: usable versions of ptxas,
    the compiler's own first.
    """
    return Levers(
        kernel_names=("", NAME_PREFIX + kernel),
        max_registers=(None, *register_budgets(registers, launch)),
        options=((), *OPTIONS),
        assemblers=("", *(a.version for a in assemblers[1:])),
    )


def register_budgets(registers: int, launch: LaunchSpec | None) -> tuple[int, ...]:
    """Register limits that let another number of blocks run on an SM, and steps around them.

    A limit above ``registers``, the number that the original uses, changes the code, too: ptxas
    schedules for the limit.  Descending; a block of the launch fits on an SM with each.
    """
    threads = launch.block[0] * launch.block[1] * launch.block[2] if launch else 0
    most = min(_MAX_REGISTERS, _REGISTER_FILE // threads if threads else _MAX_REGISTERS)
    first_above = -(-registers // _ALLOCATION_UNIT) * _ALLOCATION_UNIT
    budgets = {registers - _ALLOCATION_UNIT, registers - 2 * _ALLOCATION_UNIT, *_LARGE_BUDGETS}
    budgets |= {first_above + _ALLOCATION_UNIT * step for step in range(_STEPS_UP)}
    if threads:
        for blocks in range(1, _MAX_BLOCKS + 1):
            limit = _REGISTER_FILE // (threads * blocks)
            budgets.add(min(_MAX_REGISTERS, limit // _ALLOCATION_UNIT * _ALLOCATION_UNIT))
    least = max(_MIN_REGISTERS, _LEAST_PART * registers)
    return tuple(sorted((b for b in budgets if least <= b <= most), reverse=True))


@dataclass(frozen=True)
class ImprovedOrder:
    """A cubin with native instructions in another order."""

    cubin: bytes
    schedule: str
    """The order, as its space writes it."""


def improve_order(
    cubin: bytes,
    kernel: str,
    device: Device,
    search: Search,
    seconds: float,
    seed: int,
    flops: float | None = None,
) -> ImprovedOrder | None:
    """Move the native instructions of ``cubin`` for ``seconds``; None if nothing is better.

    ``search`` is the strategy that chooses the moves.

    The device compares with the original that it was opened for.  ``cubin`` itself takes part in
    the race of the finalists.  Raises :class:`ContractBroken` if the verifier rejects the result.
    """
    program = Program.from_cubin(cubin)
    space = ScheduleSpace(program, program.kernel(kernel))
    objective = GpuObjective(space, device, flops)
    start = space.start()
    if objective.flops is None and strategy_name(search) == SIP:
        objective.flops = nominal_flops(objective, start)
    search.run(space, objective, Budget(seconds), seed=seed)
    states = [state for state in objective.finalists() if state.key() != start.key()]
    ranked = race_states(objective, [start, *states])
    if not ranked or ranked[0].key() == start.key():
        return None
    candidate = space.impose(ranked[0]).to_cubin()
    verdict = verify(cubin, candidate)
    if not verdict.safe:
        raise ContractBroken(
            f"the verifier rejects moves of native instructions: {verdict.findings[0]}; please "
            "report this bug"
        )
    return ImprovedOrder(candidate, space.dump(ranked[0]))


_FINALISTS = 8
"""Members of the population that take part in the race after the search."""
_CHAIN_STATES = 3
"""Best orders that are tried in dependent launches, beside the original's."""


@dataclass(frozen=True)
class Setup:
    """What a search of one kernel needs: its space, how it is built, and the workers."""

    source: Source
    compiler: CompilerCommand
    spec: BuildSpec
    space: AssemblerSpace
    pool: Workers


@dataclass(frozen=True)
class Winner:
    """The candidate that goes into the final comparison."""

    candidate: Candidate
    cubin: bytes
    schedule: str | None = None
    """Moves of native instructions after the assembly."""


def prepare(
    source: Source,
    installed: Sequence[Assembler] | None = None,
    dependents_wait: bool = False,
) -> tuple[CompilerCommand, BuildSpec, AssemblerSpace]:
    """How a kernel is assembled, how its candidates are built, and their space.

    ``installed``: versions of ptxas (None: those that are found).  ``dependents_wait``: whether
    each dependent of the kernel waits for it, so that candidates may trigger them early.  Raises
    :class:`BadInput` if the source has no PTX, and if no installed ptxas accepts it.
    """
    if source.ptx is None:
        raise BadInput(
            f"{source.origin} has no PTX, so there is nothing to assemble; give a Triton kernel "
            "(path.py:kernel) or a .ptx file, or use --strategy anneal, which moves native "
            "instructions"
        )
    compiler = find_command(source, find_assemblers() if installed is None else installed)
    levers = make_levers(source.kernel, compiler.registers, source.launch, compiler.assemblers)
    spec = BuildSpec(
        source.ptx,
        source.kernel,
        compiler.command,
        compiler.assemblers,
        partial(make_space, levers=levers),
        partial(make_check, dependents_wait=dependents_wait),
    )
    return compiler, spec, make_space(source.ptx, source.kernel, levers)


@contextmanager
def open_setup(
    source: Source,
    installed: Sequence[Assembler] | None = None,
    workers: int | None = None,
    dependents_wait: bool = False,
) -> Iterator[Setup]:
    """Prepare the search of a kernel and start its workers; see :func:`prepare`.

    ``workers``: worker processes (None: one for each core).  Raises the errors of :func:`prepare`.
    """
    compiler, spec, space = prepare(source, installed, dependents_wait)
    pool: BuildPool[Candidate] = BuildPool(partial(Builder, spec), build_proposal, workers)
    with pool:
        yield Setup(source, compiler, spec, space, pool)


def tune_assembler(
    setup: Setup,
    search: Search,
    settings: Settings,
    device: Device,
    *,
    run: Run | None = None,
    observers: Sequence[Observer] = (),
    resume: bool = False,
    open_device: OpenDevice = LocalGpu,
) -> TuningResult:
    """Search for a faster way to assemble the kernel of ``setup``, and verify it.

    ``open_device`` opens the devices that measure chains, with ``settings.pdl``.

    The winner replaces the original only if a fresh process measures it as faster beyond the noise
    of the original against itself, with equal outputs.  Raises :class:`BadInput` if the original
    cannot be measured.
    """
    job = AssemblerJob(setup, settings, device, run)
    result, winner = job.run_stages(search, observers, resume)
    try:
        if settings.pdl and result.search.stopped != "interrupted":
            result = replace(result, dependent=job.try_dependent_launch(result, open_device))
    finally:  # the result of the search is complete without it
        job.record(result, winner)
    return result


class AssemblerJob:
    """The stages of a run: search, race, moves of native instructions, decision, records.

    :func:`tune_assembler` runs them; benchmarks use the parts.
    """

    def __init__(self, setup: Setup, settings: Settings, device: Device, run: Run | None) -> None:
        self.setup, self.settings, self.device, self.run = setup, settings, device, run
        self._ranked: list[PtxState] = []
        """The finalists after the race, best first."""
        self.native_refused = ""
        """Why native instructions are not moved; "" if they are."""
        self.idle_share = 0.0
        """Part of the search in which the device measured nothing."""
        launch = setup.source.launch
        self.log = CandidateLog(run.path / CANDIDATES_FILE) if run is not None else None
        self.objective = AssemblerObjective(
            setup.pool, device, launch.flops if launch else None, self.log
        )
        if run is not None:
            run.write("original.cubin", setup.source.cubin)
            run.write(PTX_FILE, setup.spec.ptx.encode())

    def run_stages(
        self, search: Search, observers: Sequence[Observer], resume: bool
    ) -> tuple[TuningResult, Winner | None]:
        """All stages up to the decision."""
        self._check_native()
        found = self._search(search, observers, resume)
        ranked = self._ranked = race_states(self.objective, self._safe_states(found)[:_FINALISTS])
        winner = None
        if ranked:
            candidate = self.objective.candidate(ranked[0])
            winner = Winner(candidate, candidate.cubin)
            if found.stopped != "interrupted":
                winner = self._improve_order(winner)
        return self._decide(found, winner), winner

    def _check_native(self) -> None:
        """Leave native instructions where they are if the latency table does not hold here."""
        source = self.setup.source
        if self.settings.anneal_share <= 0 or are_measured(source.cubin):
            return
        program = Program.from_cubin(source.cubin)
        try:
            space = ScheduleSpace(program, program.kernel(source.kernel))
            check_distances(space, self.device)
        except UnsupportedArchitecture as error:
            self.native_refused = str(error)
            self.settings = replace(self.settings, anneal_share=0.0)

    def _safe_states(self, found: SearchResult[PtxState]) -> list[PtxState]:
        """The finalists that pass the verifier of machine code, best first.

        If none passes, the best states of the portfolio that pass: the finalists descend from few
        states, so what makes one of them unsafe may be in all.
        """
        space = self.setup.space
        members = [member.state for member in finalists(found, space)]
        if safe := self.objective.safe_states([s for s in members if s != space.start()]):
            return safe
        portfolio = best_of_portfolio(found, space, _FINALISTS)
        return self.objective.safe_states([s for s in portfolio if s != space.start()])

    def try_dependent_launch(
        self, result: TuningResult, open_device: OpenDevice
    ) -> DependentResult | None:
        """Waits in the best orders and in the original's, measured in chains."""
        source = self.setup.source
        assert source.launch is not None
        return tune_chain(
            Kernel(source.cubin, source.kernel, source.launch),
            self.objective,
            self.settings,
            [*self._ranked[:_CHAIN_STATES], self.setup.space.start()],
            result.cubin if result.improved else None,
            self.setup.spec,
            open_device,
        )

    def record(self, result: TuningResult, winner: Winner | None) -> None:
        """Write the result to the run directory."""
        if self.log is not None:
            self.log.flush()
        if self.run is None:
            return
        source, settings = self.setup.source, self.settings
        self.run.write("best.cubin", result.cubin)
        if result.recipe is not None:
            self.run.write(RECIPE_FILE, result.recipe.to_bytes())
        if result.dependent is not None and result.dependent.improved:
            self.run.write(DEPENDENT_CUBIN_FILE, result.dependent.cubin)
            self.run.write(DEPENDENT_RECIPE_FILE, result.dependent.recipe.to_bytes())
        sm = int(self.setup.compiler.command.target.removeprefix("sm_").rstrip("af"))
        provenance = provenance_record(source, sm, settings, result)
        self.run.write("provenance.json", json.dumps(provenance, indent=1).encode())
        record = result_record(result, settings, self.objective)
        record["assembler"] = self.describe(result, winner)
        if result.dependent is not None:
            record["dependent_launch"] = dependent_record(result.dependent)
        if result.improved and winner is not None:
            with suppress(KeyboardInterrupt):  # the result is complete without the ablation
                ablation = ablate(self.setup.space, self.objective, winner.candidate.state)
                record["assembler"]["ablation"] = ablation.to_json() if ablation else None
        interrupted = result.search.stopped == "interrupted"
        self.run.finish("interrupted" if interrupted else "done", record)

    def describe(self, result: TuningResult, winner: Winner | None) -> dict[str, Any]:
        """What the search did, beside the fields that all results have."""
        setup, objective = self.setup, self.objective
        source = setup.source
        described: dict[str, Any] = {
            "ptxas": [assembler.version for assembler in setup.compiler.assemblers],
            "arguments": list(setup.compiler.command.arguments()),
            "reproduces": setup.compiler.reproduces,
            "workers": setup.pool.workers,
            "idle_share": self.idle_share,
            "native_refused": self.native_refused,
            "counts": dict(objective.outcome_counts),
            "codes": dict(objective.codes),
            "original": {
                **describe_resources(source.cubin, source.kernel, source.launch),
                "spill_bytes": setup.compiler.spill_bytes,
            },
        }
        if winner is not None:
            described["winner"] = self._describe_winner(winner)
        return described

    def _describe_winner(self, winner: Winner) -> dict[str, Any]:
        source, state = self.setup.source, winner.candidate.state
        resources = winner.candidate.resources
        levers = describe_levers(state)
        if winner.schedule is not None:
            levers.append(f"moves of native instructions ({self.settings.native})")
        return {
            **describe_resources(winner.cubin, source.kernel, source.launch),
            "spill_bytes": resources.spill_bytes if resources else None,
            "levers": levers,
            "lineage": read_lineage(self.log.path, state) if self.log is not None else [],
        }

    def _search(
        self, search: Search, observers: Sequence[Observer], resume: bool
    ) -> SearchResult[PtxState]:
        checkpoint = self.run.checkpoint() if self.run is not None and resume else None
        recorders: list[Observer] = [self.log] if self.log is not None else []
        if self.run is not None:
            recorders.append(self.run)
        found = search.run(
            self.setup.space,
            self.objective,
            self._search_budget(),
            seed=self.settings.seed,
            observers=[*observers, *recorders],
            resume=checkpoint,
        )
        self.idle_share = idle_share(self.objective, found.seconds)
        return found

    def _search_budget(self) -> Budget:
        """The limits without the share of the moves of native instructions."""
        budget = self.settings.budget
        if budget.seconds is None:
            return budget
        return replace(budget, seconds=budget.seconds * (1 - self.settings.anneal_share))

    def _improve_order(self, winner: Winner) -> Winner:
        """The winner after moves of its native instructions, if they help."""
        seconds = (self.settings.seconds or 0.0) * self.settings.anneal_share
        if seconds <= 0:
            return winner
        kernel, flops = self.setup.source.kernel, self.objective.flops
        improved = improve_order(
            winner.cubin,
            kernel,
            self.device,
            make_strategy(self.settings.native),
            seconds,
            self.settings.seed,
            flops,
        )
        if improved is None:
            return winner
        return replace(winner, cubin=improved.cubin, schedule=improved.schedule)

    def _decide(self, found: SearchResult[PtxState], winner: Winner | None) -> TuningResult:
        """Verify the winner and compare it with the original in a fresh process."""
        source, settings = self.setup.source, self.settings
        if winner is None:
            verdict = kernel_verdict(source.cubin, source.kernel)
            return TuningResult(source.cubin, found, verdict, False, 0, 0)
        verdict = kernel_verdict(winner.cubin, source.kernel)
        if not verdict.safe:
            if self.run is not None:
                self.run.write(UNSAFE_CUBIN_FILE, winner.cubin)
                self.run.finish("failed", {"verdict": verdict_record(verdict)})
            raise ContractBroken(
                f"the verifier rejects the cubin that the search found: {verdict.findings[0]}; the "
                "result is the original; please report this bug with the run directory"
            )
        decision = decide(
            self.device, winner.cubin, settings.rounds, settings.checks, settings.seed
        )
        reports = run_sanitizer(source, settings, winner.cubin) if decision.faster else {}
        is_clean = all(report.answer != "errors" for report in reports.values())
        improved = decision.faster and is_clean
        recipe: Recipe = make_recipe(
            self.setup.spec,
            winner.candidate,
            winner.schedule,
            winner.cubin,
            reproduces=self.setup.compiler.reproduces,
        )
        return TuningResult(
            cubin=winner.cubin if improved else source.cubin,
            search=found,
            verdict=verdict,
            improved=improved,
            num_moved=0,
            num_retimed=0,
            decision=decision,
            sanitizer_reports=reports,
            recipe=recipe if improved else None,
        )
