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
from benchmarks.sass.sampled_search import SampledSearch, model_sample
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
from nostall.tuning.strategies import make_strategy

OpenDevice = Callable[[Kernel, MeasurementPlan], AbstractContextManager[Device]]


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
    open: OpenDevice = LocalGpu
    policy: Path | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        return self.entry.name, self.strategy, self.seed


def strategies() -> dict[str, Search]:
    """The contestants; ``sip`` restarts when its one published run has ended."""
    return {"anneal": Anneal(), "sip": Sip(restarts=True)}


def make_search(name: str, policy: Path | None) -> Search:
    """One of :func:`strategies`, or one that learns: ``cuasmrl``, ``ppo``, ``ppo-trained``."""
    if name == "ppo-trained":
        return make_strategy("ppo", policy=policy)
    return strategies()[name] if name in strategies() else make_strategy(name)


def measure(cell: Cell) -> Record:
    """Search for ``cell.seconds``, race the finalists, decide in a fresh process; then ask the
    model about the candidates."""
    _warm_up_numba()
    source = cached_build(cell.entry, cell.options)
    assert source.launch is not None
    began = monotonic()
    settings = Settings(cell.strategy, cell.seed, cell.seconds, objective="gpu", checks=cell.checks)
    search = SampledSearch(make_search(cell.strategy, cell.policy))
    kernel = Kernel(source.cubin, source.kernel, source.launch)
    with cell.open(kernel, MeasurementPlan(seed=cell.seed)) as gpu:
        counting = CountingDevice(gpu)
        tuned = tune(source, search, settings, device=counting)
    seconds = monotonic() - began
    modelled_sample = model_sample(search, source.launch)
    return make_record(cell, source, settings, tuned, counting, seconds, modelled_sample)


@cache
def _warm_up_numba() -> None:
    """Have Numba compile nostall's own loops before the clock of the first search runs."""
    source = load_cubin(EXAMPLES / "nvcc" / "dot_product.sm_90.cubin")
    program = Program.from_cubin(source.cubin)
    space = ScheduleSpace(program, program.kernel(source.kernel))
    state, _ = take_random_moves(space, space.start(), np.random.default_rng(0), 10)
    model = SmModel(program, program.kernel(source.kernel), LaunchSpec())
    model.evaluate([state])


@cache
def cached_build(entry: Entry, options: Options | None) -> Source:
    """Compiled once per process."""
    return build(entry, options)


def make_record(
    cell: Cell,
    source: Source,
    settings: Settings,
    tuned: TuningResult,
    device: CountingDevice,
    seconds: float,
    modelled_sample: Modelled | None = None,
) -> Record:
    """What a tuning run found, in the form of ``results/schema.json``."""
    found, decision = tuned.search, tuned.decision
    assert decision is not None and source.launch is not None
    comparison, timing = decision.comparison, decision.outcome.timing
    about, header = dict(device.info), head()
    samples = None
    original = found.start_measurement.value * 1e6
    if timing is not None:
        sides = (timing.original, timing.candidate, timing.null)
        original_us, candidate_us, null_us = map(_microseconds, sides)
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
        ratio=comparison.ratio if comparison else None,
        deployed_ratio=tuned.ratio,
        ci_low=comparison.low if comparison else None,
        ci_high=comparison.high if comparison else None,
        null_low=comparison.null_low if comparison else None,
        null_high=comparison.null_high if comparison else None,
        candidates=sum(device.outcome_counts.values()),
        faults=sum(
            n for fate, n in device.outcome_counts.items() if fate not in ("timed", "rejected")
        ),
        seconds=round(seconds, 2),
        gpu=about.pop("gpu", "unknown"),
        driver=about.pop("driver_version", "unknown"),
        versions=header["versions"],
        command=header["command"],
        date=header["date"],
        samples=samples,
        modelled=modelled_sample,
        failure="" if comparison else f"{decision.outcome.status}: {decision.outcome.detail}",
        details={
            "rejected_moves": found.rejected,
            "fates": device.outcome_counts,
            "spent_s": {part: round(value, 3) for part, value in device.phase_seconds.items()},
            "search_s": round(found.seconds, 2),
            "moved": tuned.num_moved,
            "retimed": tuned.num_retimed,
            "compiled": dict(source.provenance),
            "gpu": about,
        },
    )


class CountingDevice:
    """Passes on, and counts what became of every candidate."""

    def __init__(self, gpu: Device) -> None:
        self.gpu = gpu
        self.outcome_counts: dict[str, int] = {}
        self.phase_seconds: dict[str, float] = {}

    @property
    def info(self) -> Any:
        return self.gpu.info

    def evaluate(self, cubin: bytes) -> Outcome:
        return self._count(self.gpu.evaluate(cubin))

    def start(self, cubin: bytes) -> PendingOutcome:
        """As the device's own, or done at once where it cannot overlap."""
        if not isinstance(self.gpu, AsyncDevice):
            outcome = self.gpu.evaluate(cubin)
            return PendingOutcome(lambda: True, lambda: self._count(outcome))
        pending = self.gpu.start(cubin)
        return PendingOutcome(pending.ready, lambda: self._count(pending.wait()), pending.prefetch)

    def _count(self, outcome: Outcome) -> Outcome:
        self.outcome_counts[outcome.status] = self.outcome_counts.get(outcome.status, 0) + 1
        for part, value in outcome.phase_seconds.items():
            self.phase_seconds[part] = self.phase_seconds.get(part, 0.0) + value
        return outcome

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        return self.gpu.compare(cubin, rounds, checks)


def _microseconds(samples: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(s * 1e6, 4) for s in samples)
