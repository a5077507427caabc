"""Do the attention kernels compute exact attention, and read nothing outside their tensors?

    python -m benchmarks run serving.kernel_check --out kernel_check.json --seconds 90 \\
        --sanitizer compute-sanitizer

Each variant runs seeded ragged batches in a process of its own, all processes at the same time, and
is killed at the deadline. All results are compared with fp64; pages that a batch does not own hold
NaN, and block-table entries behind the last page name no page. ``--sanitizer`` also runs a few
variants under memcheck, with an allocation of its own for each tensor.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import save
from benchmarks.serving.checks import memcheck
from benchmarks.serving.checks.kernel_check_child import VARIANTS

SANITIZED = ("tall 32/8", "decode 32/8", "mixed 32/8", "tables", "prefixes 32/8")
"""Variants that also run under memcheck."""
SANITIZED_CASES = 4
CHILD = "benchmarks.serving.checks.kernel_check_child"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    parser.add_argument("--out", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--seconds", type=float, default=90.0, help="deadline of all variants")
    parser.add_argument("--cases", type=int, default=60, help="batches of each variant")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="separated by commas")
    parser.add_argument("--sanitizer", help="command of compute-sanitizer; without it no memcheck")


def start(name: str, out: Path, cases: int, options: argparse.Namespace, is_sanitized: bool) -> Any:
    """The process of one variant."""
    arguments = ["-m", CHILD, "--variant", name, "--cases", str(cases)]
    arguments += ["--seconds", str(options.seconds - 5), "--out", str(out)]
    return memcheck.start(arguments, out, options.sanitizer if is_sanitized else None)


def record(name: str, out: Path, cases: int, code: int | None, is_sanitized: bool) -> Any:
    """What a variant did; ``code`` None: it was killed at the deadline."""
    lines = out.read_text().splitlines() if out.exists() else []
    done = [json.loads(line) for line in lines]
    log = out.with_suffix(".log").read_text()
    wrong = [case for case in done if case.get("problem")]
    result = {
        "variant": name,
        "memcheck": is_sanitized,
        "cases": len([case for case in done if "problem" in case]),
        "planned": cases,
        "wrong": wrong,
        "largest_error": max((case["error"] for case in done if "error" in case), default=None),
        "exit_code": code,
        "log": "" if code == 0 else log[-1500:],
    }
    if is_sanitized:
        result["memory_errors"] = memcheck.memory_errors(log)
    return result


def table(results: list[dict[str, Any]]) -> str:
    """One line for each variant."""
    lines = []
    for row in results:
        name = f"memcheck {row['variant']}" if row["memcheck"] else row["variant"]
        error = "-" if row["largest_error"] is None else f"{row['largest_error']:.2f}"
        line = f"{name:22} {row['cases']:3}/{row['planned']} batches, {len(row['wrong'])} wrong"
        line += f", largest error {error} of the limit, exit {row['exit_code']}"
        if row["memcheck"]:
            line += f", memory errors {row['memory_errors']}"
        lines.append(line)
    return "\n".join(lines)


def main(options: argparse.Namespace) -> int:
    """Run all variants; returns 1 if one was wrong, or did not end by itself."""
    jobs = [(name, options.cases, False) for name in options.variants.split(",")]
    if options.sanitizer:
        jobs += [(name, SANITIZED_CASES, True) for name in SANITIZED]
    results = []
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"{number}.jsonl" for number in range(len(jobs))]
        processes = [
            start(name, out, cases, options, is_sanitized)
            for (name, cases, is_sanitized), out in zip(jobs, outs, strict=True)
        ]
        for (name, cases, is_sanitized), out, process in zip(jobs, outs, processes, strict=True):
            code = memcheck.exit_code(process, end)
            results.append(record(name, out, cases, code, is_sanitized))
            save(options.out, kind="checked", results=results)
    print(table(results))
    return int(any(row["wrong"] or row["exit_code"] != 0 for row in results))
