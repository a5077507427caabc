"""How fast are decodes that read each shared prefix once, beside FlashAttention-3?

    python -m benchmarks run serving.prefix_forests --peers FOLDER --out forests.json --seconds 150

One layer of Llama-3-8B's shape, bf16, pages of 16, at a decode step in the middle of each
workload. Nothing names the groups: the tables are built on the device from the block table, as in
vLLM. ``ours`` is the plan of the rules; ``null`` is FlashAttention-3 again. Before they are timed,
all results are compared with fp64. First ``--forests`` small random forests of several shapes run
with and without groups, and are compared with fp64 and with each other. Times are for one layer, in
CUDA graphs, taken in turns, with caches that rotate; ``tables`` is the time of the three launches
that build the tables of a step, on the device and on the host.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.result_file import head, save

if TYPE_CHECKING:
    from benchmarks.serving.attention.forest_inputs import Step


@dataclass(frozen=True)
class Workload:
    """Prompts of which each has some samples, at a decode step."""

    prompts: int
    samples: int
    shared: int
    """Tokens that the samples of a prompt share, those of the system prompt included."""
    own: int
    """Further keys of each sequence."""
    system: int = 0
    """Tokens that all prompts share."""

    @property
    def name(self) -> str:
        system = f"{self.system} + " if self.system else ""
        shared = self.shared - self.system
        return f"{self.prompts} x {self.samples}, {system}{shared} + {self.own}"

    @property
    def sequences(self) -> int:
        """Sequences of the step."""
        return self.prompts * self.samples

    @property
    def distinct_keys(self) -> int:
        """Keys that lie at different places."""
        shared = self.shared - self.system
        alone = self.own + (shared if self.samples == 1 else 0)
        common = 0 if self.samples == 1 else self.prompts * shared
        return self.system + common + self.sequences * alone


WORKLOADS = (
    Workload(32, 8, 2048, 208),
    Workload(1, 64, 4096, 208),
    Workload(16, 16, 4096, 144),
    Workload(32, 8, 512, 144),
    Workload(128, 1, 1024, 112),
    Workload(16, 8, 3072, 144, system=2048),
    Workload(8, 32, 8192, 144),
    Workload(64, 4, 1024, 144),
    *(Workload(count, 1, 1024, 112) for count in (256, 64, 32, 8, 1)),
)
SMALL = (Workload(2, 3, 128, 40), Workload(2, 2, 96, 24, system=64), Workload(3, 1, 64, 20))
"""Workloads for machines without a GPU, in Triton's interpreter."""
LAYER_JOBS = ("ours", "dependent", "decode plan")
"""Kernels of the workloads that are compiled apart."""
BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12}
"""Nominal bytes a second of the memory, by a part of the GPU's name."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    parser.add_argument("--out", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--seconds", type=float, default=150.0, help="seconds in all")
    parser.add_argument("--forests", type=int, default=500, help="random forests to check")
    parser.add_argument("--peers", type=Path, help="folder with fa3_sm90.so.xz")
    parser.add_argument("--warm", default="", help=argparse.SUPPRESS)


def main(options: argparse.Namespace) -> int:
    """Check random forests, measure all workloads within the time; returns 1 if one was wrong."""
    import torch

    from benchmarks.serving.attention.forest_inputs import SHAPES, check_forests, warm

    begin = time.monotonic()
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        from tools.interpreters.triton_interpreter import prepare

        prepare()
    if options.warm:
        warm(options.warm)
        return 0
    if has_gpu:
        _compile_all(options.out, [*SHAPES, *LAYER_JOBS])
    compiled = time.monotonic() - begin
    print(f"[{compiled:.0f} s] compiled", flush=True)
    forests = check_forests(range(options.forests), begin + 0.45 * options.seconds)
    print(f"[{time.monotonic() - begin:.0f} s] forests: {_summary(forests)}", flush=True)
    rows: list[dict[str, Any]] = []
    for workload in WORKLOADS if has_gpu else SMALL:
        if time.monotonic() - begin > options.seconds - 8:
            print(f"out of time before {workload.name}", flush=True)
            continue
        rows.append(measure(workload, options.peers))
        save(options.out, **head(), kind="measured", forests=forests, results=rows)
        print(f"[{time.monotonic() - begin:.0f} s] {line(rows[-1])}", flush=True)
    wrong = forests["wrong"] or any(row["errors"] or not row["is_right"] for row in rows)
    return int(bool(wrong) or not rows)


def _compile_all(out: Path, jobs: list[str]) -> None:
    """Compile each kernel in a process of its own, into Triton's cache on the disk."""
    command = [sys.executable, "-m", "benchmarks", "run", "serving.prefix_forests"]
    running = [
        subprocess.Popen(
            [*command, "--out", str(out), "--warm", job],
            stdout=subprocess.DEVNULL,
        )
        for job in jobs
    ]
    for process in running:
        process.wait(120)


def measure(workload: Workload, peers: Path | None) -> dict[str, Any]:
    """Samples in us of each kernel on a workload, and their errors."""
    import torch

    from benchmarks.serving.attention.cuda_graphs import GraphedCalls, interleaved_us
    from benchmarks.serving.attention.forest_inputs import Step, kernels_of

    step = Step.of(workload)
    calls, errors, rms = {}, {}, {}
    for name, make in kernels_of(step, peers).items():
        try:
            run = make()
            rms[name] = step.rms_error(run)
            calls[name] = GraphedCalls([partial(run, cache) for cache in step.caches])
        except (RuntimeError, ValueError, OSError) as error:
            errors[name] = f"{type(error).__name__}: {error}"[:200]
    tables = {"tables": GraphedCalls([step.build])}
    samples = interleaved_us(calls, 300, 1.2) | interleaved_us(tables, 50, 0.1)
    peer = rms.get("FA3", max(rms.values(), default=0.0))
    return {
        "workload": asdict(workload),
        "name": workload.name,
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none (interpreter)",
        "bound_us": bound_us(workload, step),
        "saved_us": step.saved_us,
        "scratch_mib": step.scratch_mib,
        "counts": step.counts,
        "tables_host_us": step.host_us(),
        "rms_error": rms,
        "is_right": all(value <= 1.1 * peer for value in rms.values()),
        "samples_us": samples,
        "errors": errors,
    }


def bound_us(workload: Workload, step: Step) -> float:
    """Time to read each key once, and to read queries and write results, at the nominal rate."""
    shape = step.shape
    name = step.gpu
    rate = next((rate for part, rate in BANDWIDTH.items() if part in name), BANDWIDTH["H200"])
    keys = 4 * workload.distinct_keys * shape.kv_heads * shape.head_dim
    return (keys + 4 * workload.sequences * shape.heads * shape.head_dim) / rate * 1e6


def line(row: dict[str, Any]) -> str:
    """One line a workload: medians in us, FA3 / each other kernel, and the bound."""
    medians = {name: statistics.median(values) for name, values in row["samples_us"].items()}
    base = medians.get("FA3", medians.get("ours", 0.0))
    cells = [
        f"{name} {value:.1f}" + ("" if name == "tables" else f" ({base / value:.2f})")
        for name, value in medians.items()
    ]
    failed = [f"{name}: {error[:60]}" for name, error in row["errors"].items()]
    worst = max((row["rms_error"][n] for n in row["rms_error"] if n != "FA3"), default=0.0)
    ratio = worst / row["rms_error"].get("FA3", worst or 1.0)
    return (
        f"{row['name']:24} bound {row['bound_us']:.1f}; "
        + "; ".join([*cells, *failed])
        + f"; host {row['tables_host_us']:.0f}; rms {ratio:.2f}"
    )


def _summary(forests: dict[str, Any]) -> str:
    return (
        f"{forests['checked']} checked, {forests['grouped']} with groups, "
        f"{len(forests['wrong'])} wrong"
    )
