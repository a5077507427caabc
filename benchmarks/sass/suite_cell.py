"""Measure one cell of the suite: a search on one kernel with one strategy and one seed."""

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
from nostall.tuning.job import TuningResult, tune
from nostall.tuning.settings import Settings
from nostall.tuning.sources.source import Source, load_cubin
from nostall.tuning.strategies import make_strategy

OpenDevice = Callable[[Kernel, MeasurementPlan], AbstractContextManager[Device]]


@dataclass(frozen=True)
class Cell:
    """One search of the suite, and the settings of its measurement."""

    entry: Entry
    strategy: str
    seed: int
    seconds: float
    """Time limit of the search."""
    checks: int = 16
    """New random inputs on which the best candidate must be correct."""
    baseline: tuple[Configuration, ...] | None = None
    """Compiler configurations that were timed; None for a cubin."""
    options: Options | None = None
    """The fastest configuration, which the search starts from; None for a cubin."""
    open: OpenDevice = LocalGpu
    policy: Path | None = None
    """Policy file of ``ppo-trained``."""

    @property
    def key(self) -> tuple[str, str, int]:
        return self.entry.name, self.strategy, self.seed


def strategies() -> dict[str, Search]:
    """Default strategies by name; ``sip`` restarts when its published run ends."""
    return {"anneal": Anneal(), "sip": Sip(restarts=True)}


def make_search(name: str, policy: Path | None) -> Search:
    """A search of :func:`strategies`, or ``cuasmrl``, ``ppo`` or ``ppo-trained``."""
    if name == "ppo-trained":
        return make_strategy("ppo", policy=policy)
    return strategies()[name] if name in strategies() else make_strategy(name)


def measure(cell: Cell) -> Record:
    """Search for ``cell.seconds`` and compare the best candidate with the original.

    The final comparison runs in a new process. Then the SM model evaluates a sample of the measured
    candidates.
    """
    _warm_up_numba()
    source = cached_build(cell.entry, cell.options)
    assert source.launch is not None
    began = monotonic()
    settings = Settings(
        cell.strategy,
        seed=cell.seed,
        seconds=cell.seconds,
        objective="gpu",
        checks=cell.checks,
    )
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
    """Let numba compile nostall's loops before the time of the first search starts."""
    source = load_cubin(EXAMPLES / "nvcc" / "dot_product.sm_90.cubin")
    program = Program.from_cubin(source.cubin)
    space = ScheduleSpace(program, program.kernel(source.kernel))
    state, _ = take_random_moves(space, space.start(), np.random.default_rng(0), 10)
    model = SmModel(program, program.kernel(source.kernel), LaunchSpec())
    model.evaluate([state])


@cache
def cached_build(entry: Entry, options: Options | None) -> Source:
    """``build`` with a cache, so that each process compiles a kernel once."""
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
    """Record of a tuning run, as ``harness/schema.json`` describes it."""
    result, decision = tuned.search, tuned.decision
    assert decision is not None and source.launch is not None
    comparison, timing = decision.comparison, decision.outcome.timing
    about, header = dict(device.info), head()
    samples = None
    original = result.start_measurement.value * 1e6
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
            "rejected_moves": result.rejected,
            "fates": device.outcome_counts,
            "spent_s": {part: round(value, 3) for part, value in device.phase_seconds.items()},
            "search_s": round(result.seconds, 2),
            "moved": tuned.num_moved,
            "retimed": tuned.num_retimed,
            "compiled": dict(source.provenance),
            "gpu": about,
        },
    )


class CountingDevice:
    """A device that counts the outcomes of another device and sums their phase times."""

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
        """Start an evaluation; evaluates at once if the device cannot overlap."""
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
