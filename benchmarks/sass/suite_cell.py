"""One cell of the suite's matrix: one kernel, one strategy, one seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from benchmarks.harness.result_file import head
from benchmarks.harness.schema import Configuration, Modelled, Options, Record, Samples, Shape
from benchmarks.kernels.examples import EXAMPLES
from benchmarks.kernels.suite import Entry, build
from benchmarks.sass.sampled_search import Watched, modelled
from nostall.core import LaunchSpec
from nostall.core.search import Search
from nostall.gpu import (
    AsyncDevice,
    Device,
    Kernel,
    LocalGpu,
    MeasurementPlan,
    Outcome,
    PendingOutcome,
)
from nostall.sass import Program
from nostall.sass.model import SmModel
from nostall.sass.schedule import ScheduleSpace
from nostall.search import Anneal, Sip
from nostall.search.anneal import take_random_moves
from nostall.tuning.job import Settings, TuningResult, tune
from nostall.tuning.source import Source, load_cubin
from nostall.tuning.strategies import make_strategy as learning

Open = Callable[[Kernel, MeasurementPlan], AbstractContextManager[Device]]


@dataclass(frozen=True)
class Cell:
    """What to search, for how long, from the fastest of which ``baseline`` (None: none was tried),
    and how many fresh inputs the winner has to pass.  ``policy`` is what ``ppo-trained`` begins
    with."""

    entry: Entry
    strategy: str
    seed: int
    seconds: float
    checks: int = 16
    baseline: tuple[Configuration, ...] | None = None
    options: Options | None = None
    open: Open = LocalGpu
    policy: Path | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        return self.entry.name, self.strategy, self.seed


def strategies() -> dict[str, Search]:
    """The contestants; ``sip`` restarts when its one published run has ended."""
    return {"anneal": Anneal(), "sip": Sip(restarts=True)}


def contestant(name: str, policy: Path | None) -> Search:
    """One of :func:`strategies`, or one that learns: ``cuasmrl``, ``ppo``, ``ppo-trained``."""
    if name == "ppo-trained":
        return learning("ppo", policy=policy)
    return strategies()[name] if name in strategies() else learning(name)


def measure(cell: Cell) -> Record:
    """Search for ``cell.seconds``, race the finalists, decide in a fresh process; then ask the
    model about the candidates."""
    _compile_ours()
    source = built(cell.entry, cell.options)
    assert source.launch is not None
    began = monotonic()
    settings = Settings(cell.strategy, cell.seed, cell.seconds, objective="gpu", checks=cell.checks)
    watched = Watched(contestant(cell.strategy, cell.policy))
    kernel = Kernel(source.cubin, source.kernel, source.launch)
    with cell.open(kernel, MeasurementPlan(seed=cell.seed)) as gpu:
        counting = Counting(gpu)
        tuned = tune(source, watched, settings, device=counting)
    seconds = monotonic() - began
    said = modelled(watched, source.launch)
    return record(cell, source, settings, tuned, counting, seconds, said)


@cache
def _compile_ours() -> None:
    """Have Numba compile nostall's own loops before the clock of the first search runs."""
    source = load_cubin(EXAMPLES / "nvcc" / "dot_product.sm_90.cubin")
    program = Program.from_cubin(source.cubin)
    space = ScheduleSpace(program, program.kernel(source.kernel))
    state, _ = take_random_moves(space, space.start(), np.random.default_rng(0), 10)
    model = SmModel(program, program.kernel(source.kernel), LaunchSpec())
    model.evaluate([state])


@cache
def built(entry: Entry, options: Options | None) -> Source:
    """Compiled once per process."""
    return build(entry, options)


def record(
    cell: Cell,
    source: Source,
    settings: Settings,
    tuned: TuningResult,
    kept: Counting,
    seconds: float,
    said: Modelled | None = None,
) -> Record:
    """What a tuning run found, in the form of ``results/schema.json``."""
    found, decision = tuned.search, tuned.decision
    assert decision is not None and source.launch is not None
    compared, timing = decision.comparison, decision.outcome.timing
    about, made = dict(kept.info), head()
    samples = None
    original = found.start_measurement.value * 1e6
    if timing is not None:
        parts = (timing.original, timing.candidate, timing.null)
        original_us, candidate_us, null_us = map(_microseconds, parts)
        samples = Samples(
            original=original_us, candidate=candidate_us, null=null_us, loads=timing.loads
        )
        original = float(np.median(samples.original))
    return Record(
        kernel=cell.entry.name,
        size=cell.entry.size,
        instructions=cell.entry.instructions,
        shape=Shape(grid=source.launch.grid, block=source.launch.block),
        strategy=settings.strategy,
        seed=settings.seed,
        baseline=cell.baseline,
        original_us=original,
        best_us=float(np.median(samples.candidate)) if samples else None,
        ratio=compared.ratio if compared else None,
        deployed_ratio=tuned.ratio,
        ci_low=compared.low if compared else None,
        ci_high=compared.high if compared else None,
        null_low=compared.null_low if compared else None,
        null_high=compared.null_high if compared else None,
        candidates=sum(kept.fates.values()),
        faults=sum(n for fate, n in kept.fates.items() if fate not in ("timed", "rejected")),
        seconds=round(seconds, 2),
        gpu=about.pop("gpu", "unknown"),
        driver=about.pop("driver_version", "unknown"),
        versions=made["versions"],
        command=made["command"],
        date=made["date"],
        samples=samples,
        modelled=said,
        failure="" if compared else f"{decision.outcome.status}: {decision.outcome.detail}",
        details={
            "rejected_moves": found.rejected,
            "fates": kept.fates,
            "spent_s": {part: round(value, 3) for part, value in kept.spent.items()},
            "search_s": round(found.seconds, 2),
            "moved": tuned.num_moved,
            "retimed": tuned.num_retimed,
            "compiled": dict(source.provenance),
            "gpu": about,
        },
    )


class Counting:
    """Passes on, and counts what became of every candidate."""

    def __init__(self, gpu: Device) -> None:
        self.gpu = gpu
        self.fates: dict[str, int] = {}
        self.spent: dict[str, float] = {}

    @property
    def info(self) -> Any:
        return self.gpu.info

    def evaluate(self, cubin: bytes) -> Outcome:
        return self._counted(self.gpu.evaluate(cubin))

    def start(self, cubin: bytes) -> PendingOutcome:
        """As the device's own, or done at once where it cannot overlap."""
        if not isinstance(self.gpu, AsyncDevice):
            outcome = self.gpu.evaluate(cubin)
            return PendingOutcome(lambda: True, lambda: self._counted(outcome))
        pending = self.gpu.start(cubin)
        return PendingOutcome(
            pending.ready, lambda: self._counted(pending.wait()), pending.prefetch
        )

    def _counted(self, outcome: Outcome) -> Outcome:
        self.fates[outcome.status] = self.fates.get(outcome.status, 0) + 1
        for part, value in outcome.phase_seconds.items():
            self.spent[part] = self.spent.get(part, 0.0) + value
        return outcome

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        return self.gpu.compare(cubin, rounds, checks)


def _microseconds(samples: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(s * 1e6, 4) for s in samples)
