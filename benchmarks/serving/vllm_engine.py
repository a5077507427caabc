"""How fast does vLLM serve with nostall's plug-in, and with its own attention back ends?

    python -m benchmarks run serving.vllm_engine --traces FOLDER --out vllm_engine.json \\
        --engines FLASH_ATTN:0 CUSTOM:0 TRITON_ATTN:0 --workloads conv code decode-heavy

An engine is a back end and the tokens of n-gram speculation. CUSTOM is nostall's plug-in
(``NOSTALL_VLLM_ATTENTION`` says which steps it serves). Each engine is a process of its own that
serves all workloads, some rounds of each. ``conv`` and ``code`` are slices of the Azure traces of
2023; ``NAME@RATE`` paces the arrivals. Needs a GPU and vLLM 0.25 in PYTHONPATH, with nostall
installed so that vLLM finds its entry point.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.harness.result_file import save

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


def run_engine(name: str, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """The record of one engine, or what went wrong; ends after ``seconds``."""
    backend, speculate, *served = name.split(":")
    environment = {**os.environ, **ENVIRONMENT}
    if served:
        environment["NOSTALL_VLLM_ATTENTION"] = served[0]
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        out = Path(folder) / "engine.json"
        command = [sys.executable, "-m", "benchmarks.serving.vllm_child", "--backend", backend,
                   "--speculate", speculate, "--workloads", *options.workloads,
                   "--requests", str(options.requests), "--rounds", str(options.rounds),
                   "--traces", str(options.traces), "--folder", f"{folder}/model",
                   "--out", str(out)]  # fmt: skip
        detail = ""
        try:
            run = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=seconds
            )
            if run.returncode:
                detail = (run.stderr or run.stdout)[-3000:]
        except subprocess.TimeoutExpired:
            detail = f"stopped after {seconds:.0f} s"
        record = json.loads(out.read_text()) if out.is_file() else {"rounds": []}
    return {**record, "engine": name, "problem": detail}


def without_tokens(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records with the share of requests whose tokens equal those of the first engine.

    Engines are compared that speculate equally; a round that the first one lacks has no share.
    """
    kept = []
    for record in records:
        first = next(r for r in records if r.get("speculate") == record.get("speculate"))
        rounds = []
        for row, base in zip_longest(record["rounds"], first["rounds"][: len(record["rounds"])]):
            row = dict(row)
            tokens = row.pop("tokens")
            if base is not None and base["workload"] == row["workload"]:
                equal = [a == b for a, b in zip(tokens, base["tokens"], strict=True)]
                row["equal_tokens"] = sum(equal) / max(1, len(equal))
            rounds.append(row)
        kept.append({**record, "rounds": rounds})
    return kept


def table(records: list[dict[str, Any]]) -> list[str]:
    """One line for each engine and workload: the median of its rounds."""
    lines = []
    for record in records:
        for workload in dict.fromkeys(row["workload"] for row in record["rounds"]):
            rows = [row for row in record["rounds"] if row["workload"] == workload]
            best = sorted(rows, key=lambda row: row["output_tokens_per_s"])[len(rows) // 2]
            lines.append(
                f"{record['engine']:16} {workload:14} {best['output_tokens_per_s']:8.0f} tokens/s"
                f"  TTFT {best['ttft_s']['p50'] * 1e3:6.0f} {best['ttft_s']['p99'] * 1e3:6.0f} ms"
                f"  TBT {best['tbt_s']['p50'] * 1e3:5.1f} {best['tbt_s']['p99'] * 1e3:6.1f} ms"
                f"  {best['steps']} steps"
            )
        if record["problem"]:
            lines.append(f"{record['engine']}: {record['problem'].strip()[-700:]}")
        if record.get("counts"):
            lines.append(f"{record['engine']}: {json.dumps(record['counts'])[:400]}")
    return lines


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the Azure traces")
    parser.add_argument("--engines", nargs="+", default=["FLASH_ATTN:0", "CUSTOM:0"],
                        help="BACKEND:TOKENS, such as CUSTOM:7, or CUSTOM:7:all")  # fmt: skip
    parser.add_argument(
        "--workloads", nargs="+", default=["conv", "code", "decode-heavy", "prefill-heavy"]
    )
    parser.add_argument("--requests", type=int, default=300, help="of each workload")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--budget-s", type=float, default=540.0)


def main(options: argparse.Namespace) -> int:
    """Run the engines one after the other; returns 1 if one had a problem."""
    until = monotonic() + options.budget_s
    records: list[dict[str, Any]] = []
    for name in options.engines:
        left = until - monotonic()
        if left < 30:
            print(f"{name}: no time left", flush=True)
            continue
        records.append(run_engine(name, options, left))
        save(options.out, kind="measured", engines=without_tokens(records))
        print(*table(records[-1:]), sep="\n", flush=True)
    return 1 if any(record["problem"] for record in records) else 0
