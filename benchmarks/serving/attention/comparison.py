"""How fast is meta-attention beside FlashAttention-3, vLLM's Triton kernel and SDPA?

    python -m benchmarks run serving.attention --out FILE --peers FOLDER --budget-s 540

``--sweep`` first searches a plan for each batch; without it plans come from ``--plans`` (the result
of an earlier sweep) or are the default. Each batch runs in child processes, one for a group of
peers, and results are written as they come. Every time is for one layer, in a CUDA graph, with
caches that rotate; each kernel's result is compared with fp64 on sampled tokens first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import save
from benchmarks.serving.attention.batches import KINDS
from nostall.serving.batch.examples import make_batch
from nostall.serving.tables.host import build_tables
from nostall.serving.tables.orders import ORDERS
from nostall.serving.tables.settings import TableSettings

OTHERS = "vLLM Triton,SDPA,FlashInfer"
GROUPS = ("FA3,paper,stages,streams", OTHERS)
"""Peers that share a process; the plan and its null are measured in each."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    parser.add_argument("--out", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="folder of other kernels")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds in all")
    parser.add_argument("--batches", default=",".join(KINDS), help="names, separated by commas")
    parser.add_argument("--heads", default="32/8", help="query / KV heads, such as 32/8,28/4")
    parser.add_argument("--sweep", action="store_true", help="search a plan for each batch first")
    parser.add_argument(
        "--rules", action="store_true", help="compare the rules' plans, all batches in one process"
    )
    parser.add_argument("--no-compare", action="store_true", help="only sweep")
    parser.add_argument("--plans", type=Path, help="result file of an earlier sweep")


def main(options: argparse.Namespace) -> int:
    """Run all children within the budget; prints a table; returns 1 if no batch has a result."""
    end = time.monotonic() + options.budget_s
    results: list[dict[str, Any]] = []
    plans = _plans(json.loads(options.plans.read_text())["results"]) if options.plans else {}
    heads = [tuple(map(int, pair.split("/"))) for pair in options.heads.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        _compile(options, heads, min(150.0, options.budget_s / 3))
        for pair in heads if options.rules else ():
            results += _by_rules(options, pair, Path(folder), end)
            save(options.out, results=results)
        for pair in heads if not options.rules else ():
            for name in options.batches.split(","):
                if end - time.monotonic() < 15:
                    print(f"out of time before {name}", flush=True)
                    break
                results += _batch(options, name, pair, plans, Path(folder), end)
                save(options.out, results=results)
    print(table(results))
    return 0 if any(result["entries"] for result in results) else 1


def _by_rules(
    options: argparse.Namespace, heads: tuple[int, ...], folder: Path, end: float
) -> list[dict[str, Any]]:
    """All batches in one process; after a fault another process goes on behind the batch."""
    left, results = options.batches.split(","), []
    while left and end - time.monotonic() > 15:
        out = folder / "rules"
        command = [sys.executable, "-m", "benchmarks.serving.attention.child", "--mode", "rules"]
        command += ["--batch", ",".join(left), "--heads", *map(str, heads), "--out", f"{out}.json"]
        command += ["--peers", str(options.peers), "--group", f"FA3,paper,stages,streams,{OTHERS}"]
        seconds = end - time.monotonic() - 8
        command += ["--seconds", str(seconds)]
        process = subprocess.Popen(command)
        try:
            process.wait(seconds + 6)
        except subprocess.TimeoutExpired:
            process.kill()
        done = 0
        for name in left:
            file = folder / f"rules.{name}"
            if not file.exists():
                break
            results.append({**json.loads(file.read_text()), "mode": "rules"})
            file.unlink()
            done += 1
        if process.returncode == 0:
            break
        left = left[max(done, 1) :]
    return results


def _batch(
    options: argparse.Namespace,
    name: str,
    heads: tuple[int, ...],
    plans: dict[str, Any],
    folder: Path,
    end: float,
) -> list[dict[str, Any]]:
    """The sweep and the comparisons of one batch."""
    results = []
    key = f"{name} {heads[0]}/{heads[1]}"
    common = ["--batch", name, "--heads", *map(str, heads), "--peers", str(options.peers)]
    if options.sweep:
        result = _child([*common, "--mode", "sweep"], 30.0, folder, end)
        result["mode"] = "sweep"
        results.append(result)
        plans |= _plans([result])
    if options.no_compare:
        return results
    plan_file = folder / "plan.json"
    for group in GROUPS:
        arguments = [*common, "--mode", "compare", "--group", group]
        if key in plans:
            plan_file.write_text(json.dumps(plans[key]))
            arguments += ["--plan", str(plan_file)]
        result = _child(arguments, 8.0, folder, end)
        result["mode"] = "compare"
        results.append(result)
    return results


def _plans(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The fastest plan of each batch and heads in sweep results."""
    plans = {}
    for result in results:
        finalists = list(result.get("finalists", {}).values())
        if finalists:
            key = f"{result['batch']} {result['heads'][0]}/{result['heads'][1]}"
            plans[key] = min(finalists, key=lambda entry: entry["median_us"])["plan"]
    return plans


def _compile(options: argparse.Namespace, heads: list[tuple[int, ...]], seconds: float) -> None:
    """Compile all kernels in parallel, so that children find them in the caches."""
    begin = time.monotonic()
    for order in ORDERS:  # numba's compilations are for the children too
        build_tables(
            make_batch([1, 40], [64, 64]), TableSettings(heads[0][0], heads[0][1], 4, order=order)
        )
    workers = max(1, min(14, (os.cpu_count() or 2) - 1) // len(heads))
    processes = []
    for pair, index in itertools.product(heads, range(workers)):
        command = [sys.executable, "-m", "benchmarks.serving.attention.child", "--mode", "compile"]
        command += ["--share", str(index), str(workers), "--heads", *map(str, pair)]
        command += ["--trees"] if "tree" in options.batches else []
        command += ["--all"] if options.sweep else []
        processes.append(subprocess.Popen(command))
    for process in processes:
        try:
            process.wait(max(1.0, seconds - (time.monotonic() - begin)))
        except subprocess.TimeoutExpired:
            process.kill()
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)


def _child(arguments: list[str], seconds: float, folder: Path, end: float) -> dict[str, Any]:
    """The result of a child process; what it wrote so far if it fails or is killed."""
    out = folder / "child.json"
    out.unlink(missing_ok=True)
    seconds = max(5.0, min(seconds, end - time.monotonic() - 20))
    command = [sys.executable, "-m", "benchmarks.serving.attention.child", *arguments]
    command += ["--out", str(out), "--seconds", str(seconds)]
    begin = time.monotonic()
    note = ""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds + 40, check=False
        )
        if done.returncode:
            note = _last_error(done.stderr)
    except subprocess.TimeoutExpired:
        note = "killed: time limit"
    result = json.loads(out.read_text()) if out.exists() else {}
    result.setdefault("entries", [])
    result.setdefault("batch", arguments[1])
    result |= {"note": note, "seconds": round(time.monotonic() - begin, 1)}
    print(f"{' '.join(arguments[:6])}: {result['seconds']} s {note}", flush=True)
    return result


def _last_error(text: str) -> str:
    """The last line of an error output that names an exception."""
    lines = [line for line in text.strip().splitlines() if "Error" in line or "rror:" in line]
    return (lines or ["no message"])[-1][:300]


def table(results: list[dict[str, Any]]) -> str:
    """One line a result: the bound, and the final times as multiples of the bound."""
    lines = []
    for result in results:
        final = [entry for entry in result["entries"] if entry["final"]]
        if not final:
            lines.append(f"{result['batch']:14} no final result {result.get('note', '')}")
            continue
        least = result["bound"]["us"]
        cells = []
        for name, samples in final[-1]["samples_us"].items():
            median = statistics.median(samples)
            cells.append(f"{name[:44]} {median:.0f} ({median / least:.2f})")
        lines.append(f"{result['batch']:14} bound {least:.0f} us: " + "; ".join(cells))
    return "\n".join(lines)
