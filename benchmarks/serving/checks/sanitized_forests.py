"""Do decodes of random prefix forests read and write nothing out of bounds?

    python -m benchmarks run serving.sanitized_forests --forests 500 --seconds 500 --out OUT.json

Runs the random forests of ``serving.prefix_forests`` under compute-sanitizer's memcheck, with an
allocation of its own for each tensor: tables from block tables on the device, with and without
groups, compared with fp64. The forests are dealt to ``--parallel`` processes. Without
compute-sanitizer the result says so, and the forests run without it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import save
from benchmarks.serving.checks import memcheck

PLACES = ("/usr/local/cuda/bin/compute-sanitizer",)
"""Where CUDA installs it, beside the folders of PATH."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    parser.add_argument("--out", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--forests", type=int, default=500, help="random forests in all")
    parser.add_argument("--seconds", type=float, default=500.0, help="seconds in all")
    parser.add_argument("--parallel", type=int, default=8, help="processes")
    parser.add_argument(
        "--sanitizer", help="command of compute-sanitizer; the default looks for it"
    )
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)


def main(options: argparse.Namespace) -> int:
    """Run the forests; returns 1 if one was wrong, or if memory errors were found."""
    if options.child is not None:
        return child(options)
    sanitizer = find(options.sanitizer)
    if sanitizer is None:
        print("compute-sanitizer is not installed; the forests run without it")
    parts = max(1, min(options.parallel, options.forests))
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"{number}.json" for number in range(parts)]
        running = [start(number, out, sanitizer, options) for number, out in enumerate(outs)]
        end = time.monotonic() + options.seconds
        results = [
            ended(process, out, end, sanitizer is not None)
            for process, out in zip(running, outs, strict=True)
        ]
    checked = sum(row["checked"] for row in results)
    wrong = [row for row in results if not row["is_right"]]
    summary = {
        "sanitizer": sanitizer is not None,
        "checked": checked,
        "grouped": sum(row["grouped"] for row in results),
        "memory_errors": [row["memory_errors"] for row in results],
        "wrong": len(wrong),
    }
    save(options.out, kind="checked", summary=summary, processes=results)
    print(json.dumps(summary))
    for row in wrong[:2]:
        print(row["log"])
    return int(bool(wrong) or not checked)


def find(command: str | None) -> str | None:
    """The path of compute-sanitizer; None if there is none."""
    names = [command] if command else ["compute-sanitizer", *PLACES]
    return next((found for name in names if (found := shutil.which(name))), None)


def start(number: int, out: Path, sanitizer: str | None, options: argparse.Namespace) -> Any:
    """The process of one part of the forests."""
    arguments = ["-m", "benchmarks", "run", "serving.sanitized_forests"]
    arguments += ["--out", str(out), "--child", str(number), "--forests", str(options.forests)]
    arguments += ["--parallel", str(options.parallel), "--seconds", str(options.seconds - 20)]
    return memcheck.start(arguments, out, sanitizer)


def ended(process: Any, out: Path, end: float, is_sanitized: bool) -> dict[str, Any]:
    """What a process found."""
    code = memcheck.exit_code(process, end)
    log = out.with_suffix(".log").read_text()
    found = json.loads(out.read_text()) if out.exists() else {"checked": 0, "grouped": 0}
    errors = memcheck.memory_errors(log)
    is_right = code == 0 and not found.get("wrong") and (errors == 0 or not is_sanitized)
    return {
        **found,
        "exit_code": code,
        "memory_errors": errors,
        "is_right": is_right,
        "log": "" if is_right else log[-2500:],
    }


def child(options: argparse.Namespace) -> int:
    """Check every ``parallel``-th forest."""
    import torch

    if not torch.cuda.is_available():
        from tools.interpreters.triton_interpreter import prepare

        prepare()
    from benchmarks.serving.attention.forest_inputs import check_forests

    seeds = range(options.child, options.forests, options.parallel)
    found = check_forests(seeds, time.monotonic() + options.seconds)
    options.out.write_text(json.dumps(found))
    return 0
