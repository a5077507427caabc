"""One (kernel, method, seed) of the assembler suite: search, and comparisons in fresh processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from benchmarks.harness.comparison import comparison_record
from benchmarks.ptx.evolution import Evolve
from benchmarks.ptx.spike_peer import run_spike
from nostall.core.search import SearchResult
from nostall.gpu import Device, Kernel, LocalGpu, MeasurementPlan
from nostall.sass.binary.code_hash import code_sha256
from nostall.search import Anneal, Sip
from nostall.search.orders.random_orders import best_of_portfolio
from nostall.tuning.assembler.job import AssemblerJob, Setup, Winner, open_setup
from nostall.tuning.assembler.recipes.recipe import Recipe, rebuild
from nostall.tuning.gpu_objective import Decision, decide, race_states
from nostall.tuning.job import tune
from nostall.tuning.settings import ASSEMBLER_TIMING, Settings
from nostall.tuning.sources.source import Source
from nostall.tuning.strategies import make_strategy

OpenDevice = Callable[[Kernel, MeasurementPlan], AbstractContextManager[Device]]
_PORTFOLIO_FINALISTS = 4
"""States of the portfolio that race for baseline (b)."""
_ROUNDS = 200
"""Interleaved samples of a comparison."""


_FROM_WINNER: Mapping[str, dict[str, Any]] = {
    f"{native}-from-winner": {"strategy": "assembler", "native": native, "anneal_share": 0.5}
    for native in ("anneal", "sip", "cuasmrl")
}
"""Methods that move native instructions of the assembler's winner, in half of the time."""
ABLATIONS: Mapping[str, Evolve] = {
    "evolution": Evolve(),
    "assembler-one-sigma": Evolve(without=tuple(f"reorder sigma={n} *" for n in (1, 8, 20))),
    "assembler-all-blocks": Evolve(without=("* hot",)),
    "assembler-without-recombination": Evolve(without=("recombine",)),
    "assembler-without-immigrants": Evolve(without=("immigrants",)),
    "assembler-two-parents": Evolve(population=2),
}
"""The evolution of the assembler's input, whole and with a part left out."""


@dataclass(frozen=True)
class Baseline:
    """Baseline (a): the fastest compiler configuration."""

    source: Source
    timed: tuple[Mapping[str, Any], ...]
    """The configurations that were timed in this call."""


@dataclass(frozen=True)
class Cell:
    """One search, and the settings of its measurement."""

    kernel: str
    method: str
    seed: int
    seconds: float
    checks: int = 16
    """New random inputs on which the best candidate must be correct."""
    spike: Path | None = None
    workers: int | None = None
    evaluations: int | None = None
    """Limit in place of the seconds."""
    open: OpenDevice = LocalGpu

    @property
    def key(self) -> tuple[str, str, int]:
        return self.kernel, self.method, self.seed

    @property
    def settings(self) -> Settings:
        strategy = "assembler" if self.method in ABLATIONS else self.method
        method: dict[str, Any] = _FROM_WINNER.get(self.method, {"strategy": strategy})
        return Settings(
            seed=self.seed,
            seconds=None if self.evaluations else self.seconds,
            evaluations=self.evaluations,
            objective="gpu",
            checks=self.checks,
            rounds=_ROUNDS,
            **method,
        )


def measure(cell: Cell, baseline: Baseline) -> dict[str, Any]:
    """Run the method of a cell and compare its result; returns the record."""
    source = baseline.source
    assert source.launch is not None
    began = monotonic()
    kernel = Kernel(source.cubin, source.kernel, source.launch)
    timing = ASSEMBLER_TIMING if cell.settings.strategy == "assembler" else {}
    with cell.open(kernel, MeasurementPlan(seed=cell.seed, **timing)) as gpu:
        record = METHODS[cell.method](cell, source, gpu)
        about = dict(gpu.info)
    over_a = record["over_a"]
    is_faster = over_a is not None and over_a["verdict"] == "faster"
    return {
        "kernel": cell.kernel,
        "method": cell.method,
        "seed": cell.seed,
        "seconds_searched": cell.seconds,
        "grid": source.launch.grid,
        "block": source.launch.block,
        "baseline": [dict(entry) for entry in baseline.timed],
        "compiled": dict(source.provenance),
        "deployed": over_a["ratio"] if is_faster else 1.0,
        **record,
        "seconds": round(monotonic() - began, 2),
        "gpu": about,
    }


def _assembler(cell: Cell, source: Source, gpu: Device) -> dict[str, Any]:
    """The assembler search, with baseline (b) and the gain over it."""
    with open_setup(source, workers=cell.workers) as setup:
        job = AssemblerJob(setup, cell.settings, gpu, None)
        result, winner = job.run_stages(
            ABLATIONS.get(cell.method) or make_strategy("assembler"), (), False
        )
        record = _search_record(setup, job, result.search.seconds)
        over_a = comparison_record(result.decision)
        portfolio = over_portfolio(cell, setup, job, gpu, result.search, winner, over_a)
    record |= {
        "original_us": result.search.start_measurement.value * 1e6,
        "over_a": over_a,
        **portfolio,
    }
    record["search"] |= job.describe(result, winner)
    if isinstance(result.recipe, Recipe) and source.ptx is not None:
        record["recipe"] = {
            "code": result.recipe.code,
            "state": result.recipe.state,
            "rebuilt": code_sha256(rebuild(result.recipe, source.ptx)) == result.recipe.code,
        }
    if winner is not None and cell.method in _FROM_WINNER:
        # The result over the winner as ptxas made it.
        made = winner.candidate.cubin
        moved = winner.schedule is not None
        record["native"] = _over_b(cell, source, made, winner.cubin) if moved else None
    return record


def over_portfolio(
    cell: Cell, setup: Setup, job: AssemblerJob, gpu: Device, search: SearchResult[Any],
    winner: Winner | None, over_a: Mapping[str, Any] | None,
) -> dict[str, Any]:  # fmt: skip
    """Baseline (b), which is the best of the portfolio's states, and the winner over it.

    Each comparison is a fresh process, with a null.
    """
    states = best_of_portfolio(search, setup.space, _PORTFOLIO_FINALISTS)
    start = setup.space.start()
    ranked = race_states(job.objective, [start, *(s for s in states if s != start)])
    best = ranked[0] if ranked else start
    if best == start:
        return {"portfolio": None, "portfolio_state": {}, "over_b": over_a if winner else None}
    cubin = job.objective.candidate(best).cubin
    decision = _decide(cell, gpu, cubin)
    over = over_a
    if winner is not None and decision is not None and decision.faster:
        over = _over_b(cell, setup.source, cubin, winner.cubin)
    return {
        "portfolio": comparison_record(decision),
        "portfolio_state": _settings(best),
        "over_b": over if winner else None,
    }


def _search_record(setup: Setup, job: AssemblerJob, seconds: float) -> dict[str, Any]:
    objective = job.objective
    return {
        "counts": dict(objective.outcome_counts),
        "dropped": {
            why: n
            for why, n in objective.outcome_counts.items()
            if why not in ("timed", "measured again")
        },
        "search": {
            "waiting_s": round(objective.waiting_seconds, 3),
            "search_s": round(seconds, 2),
            "workers": setup.pool.workers,
            "spent_s": {k: round(v, 2) for k, v in objective.phase_seconds.items()},
            "failures": objective.failures[:20],
        },
    }


def _over_b(cell: Cell, source: Source, b_cubin: bytes, cubin: bytes) -> dict[str, Any] | None:
    """The winner beside baseline (b), in a process of its own."""
    assert source.launch is not None
    kernel = Kernel(b_cubin, source.kernel, source.launch)
    with cell.open(kernel, MeasurementPlan(seed=cell.seed)) as gpu:
        return comparison_record(_decide(cell, gpu, cubin))


def _on_sass(cell: Cell, source: Source, gpu: Device) -> dict[str, Any]:
    """A strategy that moves native instructions."""
    search = {"anneal": Anneal(), "sip": Sip(restarts=True)}[cell.method]
    result = tune(source, search, cell.settings, device=gpu)
    return {
        "original_us": result.search.start_measurement.value * 1e6,
        "over_a": comparison_record(result.decision),
        "counts": {"evaluations": result.search.evaluations},
        "search": {"search_s": round(result.search.seconds, 2)},
    }


def _spike(cell: Cell, source: Source, gpu: Device) -> dict[str, Any]:
    """The throw-away peer at equal seconds; its winner is compared like the others."""
    if cell.spike is None:
        raise ValueError("the method spike needs --spike FOLDER")
    found = run_spike(cell.spike, source, cell.seconds)
    decision = _decide(cell, gpu, found.cubin) if found.cubin else None
    original = decision.outcome.timing if decision else None
    return {
        "original_us": float(np.median(original.original)) * 1e6 if original else found.original_us,
        "over_a": comparison_record(decision),
        "counts": found.counts,
        "search": {"own_ratio": found.own_ratio, "label": found.label, "seconds": found.seconds},
    }


METHODS: Mapping[str, Callable[[Cell, Source, Device], dict[str, Any]]] = {
    "assembler": _assembler,
    **dict.fromkeys((*_FROM_WINNER, *ABLATIONS), _assembler),
    "anneal": _on_sass,
    "sip": _on_sass,
    "spike": _spike,
}
"""Methods by name."""


def _decide(cell: Cell, gpu: Device, cubin: bytes) -> Decision:
    return decide(gpu, cubin, _ROUNDS, cell.checks, cell.seed)


def _settings(state: Any) -> dict[str, Any]:
    """The settings of a state that are not the default."""
    names = ("kernel_name", "max_registers", "options", "assembler")
    values = {name: getattr(state, name) for name in names if getattr(state, name)}
    return values | ({"hints": len(state.hints)} if state.hints else {})
