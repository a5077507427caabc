"""Measured speed-ups: strategies at equal GPU seconds on the example kernels.

    python -m benchmarks.gpu_suite --seconds 20 --seeds 3 --out benchmarks/results/gpu_suite.json

Each (kernel, strategy, seed) is one record, appended when it is done; a second run does only what
is missing, so the matrix can be measured in slices (``--limit`` seconds).  The last word on each is
a fresh process: interleaved launches of original, candidate and original again.  With
``--baseline FILE`` the original is the fastest of the compiler configurations that
:mod:`benchmarks.baseline` tried.  Needs a GPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from benchmarks.baseline import fastest
from benchmarks.baseline import load as load_baselines
from benchmarks.example_kernels import sources
from benchmarks.provenance import head
from benchmarks.record import Configuration, Record, ResultFile, Samples, Shape, read
from nostall.core import BadInput
from nostall.core.run import write_atomically
from nostall.core.search import Search
from nostall.gpu import Device, Kernel, LocalGpu, Plan
from nostall.search import Anneal, Sip
from nostall.tuning.job import Settings, Tuned, tune
from nostall.tuning.source import Source

Baseline = tuple[Configuration, ...] | None


def strategies() -> dict[str, Search]:
    """The contestants; ``sip`` restarts when its one published run has ended."""
    return {"anneal": Anneal(), "sip": Sip(restarts=True)}


def measure(
    name: str, source: Source, strategy: str, seed: int, seconds: float, baseline: Baseline
) -> Record:
    """One record: search for ``seconds``, race the finalists, decide in a fresh process."""
    assert source.launch is not None
    began = monotonic()
    settings = Settings(strategy, seed, seconds, objective="gpu")
    kernel = Kernel(source.cubin, source.kernel, source.launch)
    with LocalGpu(kernel, Plan(seed=seed)) as gpu:
        kept = Counting(gpu)
        tuned = tune(source, strategies()[strategy], settings, device=kept)
    return record(name, source, settings, tuned, kept, monotonic() - began, baseline)


def record(
    name: str,
    source: Source,
    settings: Settings,
    tuned: Tuned,
    kept: Counting,
    seconds: float,
    baseline: Baseline,
) -> Record:
    """What a tuning run found, in the form of ``results/schema.json``."""
    found, decision = tuned.search, tuned.decision
    assert decision is not None and source.launch is not None
    compared, timing = decision.comparison, decision.outcome.timing
    about, made = dict(kept.about), head()
    samples = None
    original = found.start_measurement.value * 1e6
    if timing is not None:
        parts = (timing.original, timing.candidate, timing.null)
        original_us, candidate_us, null_us = map(_microseconds, parts)
        samples = Samples(original=original_us, candidate=candidate_us, null=null_us)
        original = float(np.median(samples.original))
    return Record(
        kernel=name,
        shape=Shape(grid=source.launch.grid, block=source.launch.block),
        strategy=settings.strategy,
        seed=settings.seed,
        baseline=baseline,
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
        failure="" if compared else f"{decision.outcome.fate}: {decision.outcome.detail}",
        details={
            "rejected_moves": found.rejected,
            "fates": kept.fates,
            "spent_s": {part: round(value, 3) for part, value in kept.spent.items()},
            "search_s": round(found.seconds, 2),
            "moved": tuned.moved,
            "retimed": tuned.retimed,
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
    def about(self) -> Any:
        return self.gpu.about

    def evaluate(self, cubin: bytes) -> Any:
        outcome = self.gpu.evaluate(cubin)
        self.fates[outcome.fate] = self.fates.get(outcome.fate, 0) + 1
        for part, value in outcome.spent.items():
            self.spent[part] = self.spent.get(part, 0.0) + value
        return outcome

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Any:
        return self.gpu.compare(cubin, rounds, checks)


def _microseconds(samples: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(round(s * 1e6, 4) for s in samples)


def _line(r: Record) -> str:
    said = r.failure
    if r.ratio is not None:
        said = f"ratio {r.ratio:.4f} [{r.ci_low:.4f}, {r.ci_high:.4f}]"
        said += f" null [{r.null_low:.4f}, {r.null_high:.4f}]"
    return (
        f"{r.kernel:26} {r.strategy:7} seed {r.seed}  {r.original_us:8.2f} us  {said}  "
        f"{r.candidates} candidates in {r.seconds:.0f} s, {r.faults} faults"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=20.0, help="of search, per record")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--strategy", nargs="*", default=list(strategies()))
    parser.add_argument("--kernel", nargs="*", help="only these")
    parser.add_argument("--baseline", type=Path, help="made by benchmarks.baseline")
    parser.add_argument("--limit", type=float, default=500.0, help="stop after so many seconds")
    options = parser.parse_args()
    started = monotonic()
    records = list(read(options.out).records) if options.out.exists() else []
    done = {(r.kernel, r.strategy, r.seed) for r in records}
    baselines = load_baselines(options.baseline) if options.baseline else {}
    best = {name: found for name, tried in baselines.items() if (found := fastest(tried))}
    chosen = {name: (c.num_warps, c.num_stages) for name, c in best.items()}
    compiled = list(sources("sm_90", chosen))
    jobs = [
        (name, source, strategy, seed)
        for seed in range(options.seeds)
        for name, source in compiled
        for strategy in options.strategy
        if (name, strategy, seed) not in done and (not options.kernel or name in options.kernel)
    ]
    for name, source, strategy, seed in jobs:
        if monotonic() - started + options.seconds * 1.3 > options.limit:
            print(f"{len(jobs)} were to do, the time is up; run again for the rest")
            break
        try:
            tried = baselines.get(name) if name in best else None
            records.append(measure(name, source, strategy, seed, options.seconds, tried))
        except BadInput as error:
            print(f"{name}: left out: {error}", flush=True)
            continue
        print(_line(records[-1]), flush=True)
        file = ResultFile(**head(), records=tuple(records))
        write_atomically(options.out, (file.model_dump_json(indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
