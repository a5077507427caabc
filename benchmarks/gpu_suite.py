"""Measured speed-ups: strategies at equal GPU seconds on the example kernels.

    python -m benchmarks.gpu_suite --seconds 20 --seeds 3 --out benchmarks/results/gpu_suite.json

Each (kernel, strategy, seed) is one record, appended when it is done; a second run does only what
is missing, so the matrix can be measured in slices (``--limit`` seconds).  The last word on each is
a fresh process: interleaved launches of original, candidate and original again.  Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.example_kernels import sources
from benchmarks.provenance import head
from nostall.core import BadInput
from nostall.core.run import write_atomically
from nostall.core.search import Search
from nostall.gpu import Kernel, LocalGpu, Plan
from nostall.search import Anneal, Sip
from nostall.tuning.job import Settings, tune
from nostall.tuning.source import Source


def strategies() -> dict[str, Search]:
    """The contestants; ``sip`` restarts when its one published run has ended."""
    return {"anneal": Anneal(), "sip": Sip(restarts=True)}


def measure(name: str, source: Source, strategy: str, seed: int, seconds: float) -> dict[str, Any]:
    """One record: search for ``seconds``, race the finalists, decide in a fresh process."""
    assert source.launch is not None
    began = monotonic()
    settings = Settings(strategy, seed, seconds, objective="gpu")
    kernel = Kernel(source.cubin, source.kernel, source.launch)
    with LocalGpu(kernel, Plan(seed=seed)) as gpu:
        kept = _Counting(gpu)
        tuned = tune(source, strategies()[strategy], settings, device=kept)
        about = dict(gpu.about)
    found, decision = tuned.search, tuned.decision
    assert decision is not None
    record: dict[str, Any] = {
        "kernel": name,
        "shape": {"grid": source.launch.grid, "block": source.launch.block},
        "strategy": strategy,
        "seed": seed,
        "kind": "measured",
        "original_us": found.start_measurement.value * 1e6,
        "deployed_ratio": tuned.ratio,
        "candidates": sum(kept.fates.values()),
        "rejected_moves": found.rejected,
        "fates": kept.fates,
        "faults": sum(n for fate, n in kept.fates.items() if fate not in ("timed", "rejected")),
        "spent_s": {part: round(value, 3) for part, value in kept.spent.items()},
        "search_s": round(found.seconds, 2),
        "seconds": round(monotonic() - began, 2),
        "moved": tuned.moved,
        "retimed": tuned.retimed,
        "gpu": about,
        "date": head()["date"],
    }
    if decision.comparison is not None and decision.outcome.timing is not None:
        compared, timing = decision.comparison, decision.outcome.timing
        record |= {
            "ratio": compared.ratio,
            "ci_low": compared.low,
            "ci_high": compared.high,
            "null_low": compared.null_low,
            "null_high": compared.null_high,
            "verdict": compared.verdict,
            "best_us": found.start_measurement.value / compared.ratio * 1e6,
            "samples_us": {
                "original": _microseconds(timing.original),
                "candidate": _microseconds(timing.candidate),
                "null": _microseconds(timing.null),
            },
        }
    return record


class _Counting:
    """Passes on, and counts what became of every candidate."""

    def __init__(self, gpu: LocalGpu) -> None:
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


def _microseconds(samples: tuple[float, ...]) -> list[float]:
    return [round(s * 1e6, 4) for s in samples]


def _line(r: dict[str, Any]) -> str:
    interval = f"[{r.get('ci_low', 0):.4f}, {r.get('ci_high', 0):.4f}]"
    null = f"[{r.get('null_low', 0):.4f}, {r.get('null_high', 0):.4f}]"
    return (
        f"{r['kernel']:26} {r['strategy']:7} seed {r['seed']}  {r['original_us']:8.2f} us  "
        f"ratio {r.get('ratio', 0):.4f} {interval} null {null}  "
        f"{r['candidates']} candidates in {r['search_s']:.0f} s, {r['fates']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=20.0, help="of search, per record")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--strategy", nargs="*", default=list(strategies()))
    parser.add_argument("--kernel", nargs="*", help="only these")
    parser.add_argument("--limit", type=float, default=500.0, help="stop after so many seconds")
    options = parser.parse_args()
    started = monotonic()
    records: list[dict[str, Any]] = []
    if options.out.exists():
        records = json.loads(options.out.read_text())["records"]
    done = {(r["kernel"], r["strategy"], r["seed"]) for r in records}
    left = list(sources("sm_90"))
    jobs = [
        (name, source, strategy, seed)
        for seed in range(options.seeds)
        for name, source in left
        for strategy in options.strategy
        if (name, strategy, seed) not in done and (not options.kernel or name in options.kernel)
    ]
    for name, source, strategy, seed in jobs:
        if monotonic() - started + options.seconds * 1.3 > options.limit:
            print(f"{len(jobs)} were to do, the time is up; run again for the rest")
            break
        try:
            records.append(measure(name, source, strategy, seed, options.seconds))
        except BadInput as error:
            print(f"{name}: left out: {error}", flush=True)
            continue
        print(_line(records[-1]), flush=True)
        body = {**head(), "records": records}
        write_atomically(options.out, (json.dumps(body, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
