"""Run the shortest slice of every benchmark that needs a GPU: does each script start and end?

    python -m benchmarks.smoke --out FOLDER [--only PART ...] [--workers N] [--limit S]

The results are no measurements: slices run side by side on the same GPU. The last lines are a table
with the exit code and the duration of each slice; ``smoke.json`` in the folder has all output ends.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.registry import BENCHMARKS, ROOT

BASELINE = str(ROOT / "sass" / "results" / "compiler_baseline.json")
KERNEL = ("--kernel", "dot_product*")
"""A pattern of one small kernel of the SASS suite."""

SLICES: Mapping[str, tuple[str, ...]] = {
    "kernels.inductor": (),
    "sass.compiler_baseline": (*KERNEL, "--limit", "30"),
    "sass.suite": (
        *KERNEL, "--baseline", BASELINE, "--seconds", "2", "--seeds", "1",
        "--strategy", "anneal", "--limit", "30",
    ),
    "sass.stall_reasons": (*KERNEL, "--baseline", BASELINE, "--limit", "30"),
    "sass.random_walks_on_gpu": ("--walks", "1", "--moves", "60", "--match", "dot_product",
                                 "--seconds", "30"),
    "sass.measured_distances": ("--seconds", "10", "--limit", "4", "--workers", "1"),
    "sass.soak": ("--folder", "{folder}/soak", *KERNEL, "--baseline", BASELINE, "--rounds", "1",
                  "--limit", "30"),
    "sass.measurement_checks": ("--part", "inputs"),
    "sass.load_overlap": (*KERNEL, "--baseline", BASELINE, "--seconds", "2"),
    "sass.farm_throughput": ("--gpus", "1", "2", "--seconds", "5"),
    "ptx.assembler_suite": (
        "--kernels", "rmsnorm-512x512", "--baseline", BASELINE, "--seconds-per-kernel", "5",
        "--configurations", "1", "--budget-s", "60",
    ),
    "ptx.search_comparison": (
        "--kernels", "wkv-*", "--baseline", BASELINE, "--seconds-per-search", "4",
        "--budget-s", "60",
    ),
    "ptx.stall_reasons": (
        "--kernels", "gemm_leakyrelu-512x512x2048@mma", "--baseline", BASELINE,
        "--winners", str(ROOT / "ptx" / "results" / "assembler_suite.json"), "--budget-s", "60",
    ),
    "ptx.transfer": (
        "--kernels", "gemm_leakyrelu-512x512x2048@mma", "--baseline", BASELINE, "--no-versions",
        "--winners", str(ROOT / "ptx" / "results" / "assembler_suite.json"), "--budget-s", "60",
    ),
    "ptx.conversions": (),
    "ptx.regression_times": (
        "--kernels", "topk-*1 warps*", "--seconds", "5", "--survey-s", "30", "--budget-s", "60",
    ),
    "ptx.dependent_launch": (
        "--kernels", "rmsnorm-512x512", "--baseline", BASELINE, "--rounds", "10",
        "--budget-s", "40",
    ),
    "serving.attention": ("--rules", "--batches", "decode-few", "--budget-s", "40"),
    "serving.gemm": ("--models", "llama3-8b", "--budget-s", "20"),
    "serving.vllm_engine": (
        "--traces", "{folder}", "--engines", "FLASH_ATTN:0", "CUSTOM:0",
        "--workloads", "decode-heavy", "--requests", "8", "--rounds", "1", "--budget-s", "120",
    ),
    "serving.forced_tokens": ("--settings", "groups", "--parallel", "5"),
    "serving.host_time": ("--samples", "20"),
    "serving.vllm_checks": ("--check", "stress", "--budget-s", "60"),
    "serving.sanitized_forests": ("--forests", "8", "--seconds", "60"),
    "serving.rollouts": (
        "--layers", "2", "--cache-gib", "4", "--rounds", "2", "--steps", "12",
        "--workloads", "4x4@256+32", "--budget-s", "190", "--profile-s", "10",
    ),
    "attach.attach_points": ("--seconds", "2"),
    "attach.native_kernels": ("--seconds", "6", "--minutes", "0.5", "--rounds", "2"),
    "fusion.host_cost": ("--device", "cuda", "--rounds", "5"),
    "fusion.chains": ("--chains", "softmax + mask 16384x3000", "--rounds", "4", "--race", "2",
                      "--inductor", "5"),
    "fusion.copy_bandwidth": (),
    "fusion.dram_traffic": ("--limit", "30"),
    "fusion.dropout_seeds": ("--rounds", "4", "--times", "4"),
    "fusion.streamed_outputs": ("--times", "4"),
    "fusion.shared_memory_reuse": ("--chains", "50257", "--rounds", "4", "--limit", "60",
                                   "--workers", "4"),
    "fusion.program_start_rate": ("--rounds", "2"),
    "fusion.dependent_launch": ("--rounds", "4"),
    "fusion.cost_model": ("--chains", "softmax + mask 16384x3000", "--most", "4", "--rounds", "4",
                          "--limit", "60"),
    "fusion.random_graphs": ("--graphs", "8"),
    "fusion.shared_memory_rows": ("--graphs", "8", "--limit", "40", "--workers", "4"),
    "fusion.multi_pass_rows": ("--graphs", "8", "--limit", "40", "--workers", "4"),
    "fusion.all_fp32_values": ("--every", "65536", "--limit", "60"),
    "fusion.opinfo": ("--each", "1", "--processes", "4"),
    "torch_compile.models": ("--models", "bert", "--small", "--pairs", "1", "--measured", "0.5",
                             "--limit", "90"),
    "torch_compile.guarantees": ("--limit", "90"),
    "parallel.predicted_vs_measured": ("--tiny", "--steps", "3", "--seconds", "30",
                                       "--links", "fast"),
    "serving.table_build": ("--device", "cuda", "--samples", "50"),
    "serving.step_costs": ("--layers", "2", "--budget-s", "60"),
    "serving.kernel_check": ("--seconds", "60", "--cases", "4", "--variants", "decode 32/8,tables"),
    "serving.prefix_groups": ("--seconds", "15"),
    "serving.fixed_cost": ("--seconds", "0.05"),
    "serving.prefix_forests": ("--seconds", "120", "--forests", "20"),
    "serving.native_winners": (
        "--batches", "decode", "--heads", "28/4", "--kernels", "meta_attention", "--seconds", "5",
        "--budget-s", "90",
    ),
    "fusion.optimizer_steps": ("--small", "--seconds", "0.2"),
    "fusion.list_plans": ("--small", "--seconds", "0.2"),
    "fusion.unseen_kinds": ("--split", "train", "--kinds", "two-hot", "--seconds", "0.2",
                            "--limit", "90"),
    "fusion.unseen_chains": ("--set", "train", "--count", "2", "--most", "2", "--limit", "60"),
    "torch_compile.user_models": ("--zoo", "users", "--models", "llama", "--small",
                                  "--measured", "0.5", "--limit", "90"),
    "torch_compile.vocabulary_models": ("--zoo", "vocabulary", "--models", "gpt2", "--small",
                                        "--measured", "0.5", "--limit", "90"),
    "torch_compile.product_kernels": ("--small", "--models", "bert-forward", "--limit", "60",
                                      "--processes", "2", "--seconds", "0.1"),
    "torch_compile.losses": ("--small", "--device", "cpu", "--seconds", "0.2"),
    "torch_compile.attention_forms": ("--forms", "groups", "--seconds", "0.2", "--small"),
    "torch_compile.varying_sizes": ("--programs", "layer", "--sizes", "1", "--seconds", "0.1",
                                    "--shrink", "8"),
    "parallel.profile_error": ("--tiny",),
    "parallel.pass_times": ("--tiny",),
    "parallel.killed_rank": (),
    "parallel.captured_steps": (),
    "parallel.peers": ("--tiny", "--models", "gpt", "--seconds", "90", "--planning-seconds", "5",
                       "--rounds", "1"),
    "parallel.step_rates": ("--gpus", "1"),
    "parallel.automap": ("--tiny", "--models", "bert", "--seconds", "60", "--rounds", "1"),
    "sharding.gpu_plans": ("--tiny", "--seconds", "60", "--planning-seconds", "5"),
    "sharding.gpu_hybrids": ("--tiny", "--seconds", "60", "--planning-seconds", "5"),
    "optimizing.programs": ("--programs", "lstm_lm", "--tiny", "--minutes", "0.5", "--limit", "120",
                            "--rounds", "4"),
    "optimizing.losses": ("--programs", "small_layers", "--tiny", "--steps", "10", "--limit", "90"),
    "optimizing.vllm": ("--workloads", "shared", "--minutes", "2", "--limit", "240"),
    "learners.gpu_traces": ("--sizes", "1", "--seconds", "30"),
    "workload.gpu": ("--tiny", "--seconds", "30"),
}  # fmt: skip
"""Options of the shortest slice of each benchmark; ``{folder}`` is the output folder."""
FOLDERS = (
    "kernels.inductor", "fusion.chains", "torch_compile.models", "torch_compile.user_models",
    "torch_compile.vocabulary_models",
)  # fmt: skip
"""Benchmarks whose ``--out`` is a folder."""
TAIL_LINES = 12


@dataclass(frozen=True)
class Outcome:
    """How one slice ended."""

    name: str
    exit_code: int | None
    """None if the slice was stopped at the time limit."""
    seconds: float
    output: str
    """The last lines of stdout and stderr."""


def gpu_benchmarks() -> list[str]:
    """Names of the benchmarks that need a GPU."""
    return [benchmark.name for benchmark in BENCHMARKS if "GPU" in benchmark.needs]


def run_slice(name: str, folder: Path, limit: float) -> Outcome:
    """Run one slice in a process of its own, for at most ``limit`` seconds."""
    out = folder / (name if name in FOLDERS else f"{name}.json")
    options = [option.format(folder=folder) for option in SLICES[name]]
    command = [sys.executable, "-m", "benchmarks", "run", name, "--out", str(out), *options]
    start = time.monotonic()
    with (folder / f"{name}.log").open("w+") as log:
        process = subprocess.Popen(
            command, cwd=ROOT.parent, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            exit_code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            exit_code = None
        log.seek(0)
        tail = "\n".join(log.read().splitlines()[-TAIL_LINES:])
    return Outcome(name, exit_code, round(time.monotonic() - start, 1), tail)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if all slices ended with exit code 0, else 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smoke", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder for results and logs")
    parser.add_argument("--only", nargs="*", default=[""], help="names that contain one of these")
    parser.add_argument("--skip", nargs="*", default=[], help="names to leave out")
    parser.add_argument("--workers", type=int, default=4, help="slices at a time")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for each slice")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    names = [
        name
        for name in SLICES
        if any(part in name for part in options.only) and name not in options.skip
    ]
    with ThreadPoolExecutor(options.workers) as pool:
        outcomes = list(pool.map(lambda name: run_slice(name, options.out, options.limit), names))
    (options.out / "smoke.json").write_text(json.dumps(list(map(asdict, outcomes)), indent=1))
    for outcome in outcomes:
        if outcome.exit_code != 0:
            print(f"--- {outcome.name}\n{outcome.output}")
    for outcome in outcomes:
        state = "time limit" if outcome.exit_code is None else f"exit code {outcome.exit_code}"
        print(f"{outcome.name:32}  {state:12}  {outcome.seconds:6.1f} s")
    return int(any(outcome.exit_code != 0 for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
