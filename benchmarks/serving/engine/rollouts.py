"""How fast does vLLM decode samples of shared prompts with nostall's plug-in?

    python -m benchmarks run serving.rollouts --out rollouts.json \\
        --workloads 32x8@2048+384 1x64@4096+384 16x16@4096+256 32x8@512+256 128x1@1024+192

A workload is PROMPTSxSAMPLES@SHARED+NEW, or with /SYSTEM behind it the tokens that all prompts
share; each sample has 16 tokens of its own. Two engines of Llama-3-8B's shape (random weights, 32
layers, prefix caching on) start at once on one GPU: FLASH_ATTN as vLLM starts it, and CUSTOM, the
plug-in with its default. Prompts are cached before the clock starts; all requests then decode at
once. The engines take turns, ``--steps`` decode steps at a time: a sample is the rate of one turn,
and ``--rounds`` samples of each engine are taken in the course of one generation. Needs a GPU and
vLLM 0.25 in PYTHONPATH, with nostall installed so that vLLM finds its entry point.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.harness.result_file import head, save
from benchmarks.serving.engine.rollout_workload import Rollout
from benchmarks.serving.engine.vllm_engine import Engine, check_vllm

CHILD = "benchmarks.serving.engine.rollouts_child"
"""Module of the process that holds one engine."""
PREPARE_S = 60.0
"""Longest time in which the prompts of a workload are cached."""
ENGINES: dict[str, dict[str, str]] = {
    "FLASH_ATTN": {},
    "CUSTOM": {},
    "TRITON_ATTN": {},
    "CASCADE": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
    "V1": {"VLLM_USE_V2_MODEL_RUNNER": "0"},
}
"""Engines by name, and their environment. CASCADE: FLASH_ATTN with vLLM's cascade attention, in the
V1 model runner; V1: CUSTOM in it."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    parser.add_argument("--out", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["FLASH_ATTN", "CUSTOM"])
    parser.add_argument("--workloads", nargs="+", type=Rollout.parse, required=True)
    parser.add_argument("--rounds", type=int, default=8, help="turns of each engine")
    parser.add_argument("--steps", type=int, default=0, help="of a turn; 0: as many as fit")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--cache-gib", type=float, default=28.0, help="of each engine")
    parser.add_argument("--start-s", type=float, default=200.0, help="longest start of the engines")
    parser.add_argument("--budget-s", type=float, default=540.0, help="of all workloads")


def main(options: argparse.Namespace) -> int:
    """Run the engines; returns 1 if one had a problem."""
    check_vllm()
    begin = monotonic()
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        engines = [
            Engine(name, Path(folder) / name, _arguments(name, options), ENGINES[name])
            for name in options.engines
        ]
        try:
            for engine in engines:
                engine.connect(begin + options.start_s)
            print(f"[{monotonic() - begin:.0f} s] started", flush=True)
            for workload in options.workloads:
                if monotonic() - begin > options.budget_s - 30:
                    print(f"out of time before {workload.name}", flush=True)
                    continue
                _measure(workload, [e for e in engines if not e.problem], options)
                print(f"[{monotonic() - begin:.0f} s] {line(workload.name, engines)}", flush=True)
                _write(engines, options)
            for engine in engines:
                if not engine.problem:
                    engine.record["counts"] = engine.ask({"do": "counts"}, 10.0)
            _write(engines, options)
        finally:
            for engine in engines:
                engine.end()
    for engine in engines:
        print(engine.name, engine.record.get("counts"), engine.problem[-1500:], flush=True)
    return int(any(engine.problem for engine in engines))


def _arguments(name: str, options: argparse.Namespace) -> list[str]:
    """The module and the options of an engine's process."""
    backend = {"CASCADE": "FLASH_ATTN", "V1": "CUSTOM"}.get(name, name)
    cascade = ["--cascade"] if name == "CASCADE" else []
    return [CHILD, "--backend", backend, "--layers", str(options.layers),
            "--cache-gib", str(options.cache_gib), *cascade]  # fmt: skip


def _measure(workload: Rollout, engines: list[Engine], options: argparse.Namespace) -> None:
    """Add the samples of one workload to the records of the engines."""
    steps = options.steps or max(1, (workload.new - 8) // options.rounds)
    found: dict[str, dict[str, Any]] = {}
    for engine in engines:
        prepared = engine.ask({"do": "prepare", "workload": workload.text}, PREPARE_S)
        if prepared is not None:
            found[engine.name] = {"workload": workload.text, **prepared, "turns": []}
    for turn in range(options.rounds):
        shift = turn % max(1, len(engines))
        for engine in engines[shift:] + engines[:shift]:
            if engine.name in found and not engine.problem:
                taken = engine.ask({"do": "decode", "steps": steps})
                if taken is not None:
                    found[engine.name]["turns"].append(taken)
    for engine in engines:
        if engine.name in found:
            if not engine.problem:
                found[engine.name] |= engine.ask({"do": "finish"}) or {}
            engine.record["rounds"].append(found[engine.name])


def rates(record: dict[str, Any]) -> list[float]:
    """Tokens a second of each turn."""
    return [turn["tokens"] / turn["seconds"] for turn in record["turns"]]


def line(name: str, engines: list[Engine]) -> str:
    """One line of a workload: medians in tokens a second, and over those of the first engine."""
    cells = []
    base: list[float] = []
    for engine in engines:
        found = [r for r in engine.record["rounds"] if Rollout.parse(r["workload"]).name == name]
        if not found or not found[-1]["turns"]:
            cells.append(f"{engine.name}: none ({engine.problem[-160:]})")
            continue
        own = rates(found[-1])
        base = base or own
        pairs = [a / b for a, b in zip(own, base, strict=False)]
        cells.append(
            f"{engine.name} {statistics.median(own):.0f} ({statistics.median(pairs):.3f}, "
            f"{min(pairs):.3f} to {max(pairs):.3f}), build {found[-1].get('build_us', 0):.0f} us"
        )
    return f"{name}: " + "; ".join(cells)


def _write(engines: list[Engine], options: argparse.Namespace) -> None:
    records = [{**e.record, "engine": e.name, "problem": e.problem} for e in engines]
    base: dict[str, Any] = {}
    for record in records:
        for row in record["rounds"]:
            first = base.setdefault(row["workload"], row.get("first_tokens", []))
            equal = [a == b for a, b in zip(row.get("first_tokens", []), first, strict=False)]
            row["equal_first_tokens"] = sum(equal) / max(1, len(equal))
    kept = [
        {
            **r,
            "rounds": [
                {k: v for k, v in row.items() if k != "first_tokens"} for row in r["rounds"]
            ],
        }
        for r in records
    ]
    save(options.out, **head(), kind="measured", cache_gib=options.cache_gib, engines=kept)
