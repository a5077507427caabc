"""Measured gains of search strategies on the suite's kernels, at equal seconds on a GPU.

    python -m benchmarks run sass.compiler_baseline --out gpu_baseline.json
    python -m benchmarks run sass.suite --seconds 12 --seeds 3 --baseline gpu_baseline.json \\
        --out gpu_suite.json

Each (kernel, strategy, seed) is one record, written when it is done. A second run measures only
missing records, so the measurement can be split (``--limit`` seconds each). All records of seed 0
come before those of seed 1, so that an interrupted measurement has complete seeds. All visible GPUs
are used, each for its own kernels. The original is the fastest of the configurations of
:mod:`benchmarks.sass.compiler_baseline`. The final comparison runs in a new process, with
interleaved launches of the original, the candidate and the original again (null).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.harness import gpu_pool
from benchmarks.harness.result_file import head, text
from benchmarks.harness.schema import Configuration, Record, ResultFile, read
from benchmarks.kernels.suite import Entry, entries
from benchmarks.sass.compiler_baseline import fastest, is_selected
from benchmarks.sass.compiler_baseline import load as load_baselines
from benchmarks.sass.suite_cell import Cell, OpenDevice, measure, strategies
from nostall.core.errors import BadInput
from nostall.core.files.atomic import write_atomically
from nostall.gpu import LocalGpu

_OVERHEAD = 15.0
"""Expected seconds of a record beyond its search; large sizes have large inputs."""


def missing_cells(
    suite: tuple[Entry, ...],
    baselines: dict[str, tuple[Configuration, ...]],
    options: argparse.Namespace,
    done: set[tuple[str, str, int]],
    opened: OpenDevice = LocalGpu,
) -> list[Cell]:
    """Cells that ``done`` does not contain, ordered by seed.

    Triton kernels without a baseline are left out; cubins need none.
    """
    cells = []
    for seed in range(options.seeds):
        for entry in suite:
            tried = baselines.get(entry.name)
            best = fastest(tried) if tried else None
            if (entry.options and best is None) or not is_selected(entry.name, options):
                continue
            for strategy in options.strategy:
                cell = Cell(
                    entry=entry,
                    strategy=strategy,
                    seed=seed,
                    seconds=options.seconds,
                    checks=6 if entry.size == "filling" else 16,
                    baseline=tried,
                    options=best.options if best else None,
                    open=opened,
                    policy=options.policy,
                )
                if cell.key not in done:
                    cells.append(cell)
    return cells


def measure_cells(
    cells: list[Cell], names: list[str], gpus: list[str], until: float, out: Path
) -> None:
    """Measure ``cells`` on ``gpus`` and add each record to the file ``out`` when it is done.

    ``names``: all kernels of the suite, in the order of the file.
    """
    records: list[Record] = list(read(out).records) if out.exists() else []
    measured_names = [name for name in names if any(cell.entry.name == name for cell in cells)]
    queues = gpu_pool.assign_queues(cells, len(gpus), lambda cell: cell.entry.name, measured_names)
    num_results = 0
    for result in gpu_pool.run_jobs(measure, queues, gpus, until, lambda c: c.seconds + _OVERHEAD):
        num_results += 1
        if result.result is None:
            print(f"{result.job.key}: left out: {result.error!r}"[:300], flush=True)
            continue
        records.append(result.result)
        print(summary_line(result.result), flush=True)
        body = make_result_file(records, names).model_dump(mode="json")
        write_atomically(out, text(body).encode())
    if num_results < len(cells):
        missing = len(cells) - num_results
        print(f"{missing} of {len(cells)} are left, the time is up; run again for them")


def make_result_file(records: list[Record], names: list[str]) -> ResultFile:
    """A result file with the records ordered by seed and by the order of ``names``."""
    header: dict[str, Any] = head()
    kernels = {name: number for number, name in enumerate(names)}
    ranked = sorted(records, key=lambda r: (r.seed, kernels.get(r.kernel, len(kernels))))
    return ResultFile(**header, records=tuple(ranked))


def summary_line(r: Record) -> str:
    """A record in one line."""
    outcome = r.failure
    if r.ratio is not None:
        outcome = f"ratio {r.ratio:.4f} [{r.ci_low:.4f}, {r.ci_high:.4f}]"
        outcome += f" null [{r.null_low:.4f}, {r.null_high:.4f}]"
    tau = r.modelled.kendall_tau if r.modelled else None
    return (
        f"{r.kernel:40} {r.strategy:7} seed {r.seed}  {r.original_us:8.2f} us  {outcome}  "
        f"{r.candidates} candidates in {r.seconds:.0f} s, {r.faults} faults"
        f"{f', tau {tau:.2f}' if tau is not None else ''}"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--baseline", type=Path, required=True, help="made by benchmarks.sass.compiler_baseline"
    )
    parser.add_argument("--inductor", type=Path, help="made by benchmarks.kernels.inductor")
    parser.add_argument("--seconds", type=float, default=12.0, help="of search, per record")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--strategy", nargs="*", default=list(strategies()))
    parser.add_argument("--policy", type=Path, help="policy file of ppo-trained")
    parser.add_argument("--kernel", nargs="*", default=["*"], help="only these (patterns)")
    parser.add_argument("--skip", nargs="*", default=[], help="not these (patterns)")
    parser.add_argument("--limit", type=float, default=500.0, help="stop after so many seconds")


def main(options: argparse.Namespace) -> None:
    if "ppo-trained" in options.strategy and options.policy is None:
        raise BadInput("ppo-trained starts from a policy; give --policy FILE of `nostall train`")
    until = monotonic() + options.limit
    gpus = gpu_pool.visible_gpus()
    if not gpus:
        raise SystemExit("no GPU is visible; `nostall doctor` shows what is there")
    records = read(options.out).records if options.out.exists() else ()
    done = {(r.kernel, r.strategy, r.seed) for r in records}
    suite, baselines = entries(options.inductor), load_baselines(options.baseline)
    without = [e.name for e in suite if e.options and e.name not in baselines]
    if without:
        print(f"no baseline, so left out: {', '.join(without)}", flush=True)
    cells = missing_cells(suite, baselines, options, done)
    measure_cells(cells, [entry.name for entry in suite], gpus, until, options.out)
