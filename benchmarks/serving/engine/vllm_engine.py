"""How fast does vLLM serve with nostall's plug-in, and with its own attention back ends?

    python -m benchmarks run serving.vllm_engine --traces FOLDER --out vllm_engine.json \\
        --engines FLASH_ATTN:0 CUSTOM:0 CUSTOM:0:linear TRITON_ATTN:0 --linear table.json

An engine is a back end and the tokens of n-gram speculation. CUSTOM is nostall's plug-in; ``all``
as third part lets it serve all steps, ``linear`` gives it the table of ``nostall serving tune``.
All engines start at once on the same GPU, each with its part of the memory, and serve in turns, so
that a busy machine slows all of them. ``conv`` and ``code`` are slices of the Azure traces of 2023;
``NAME@RATE`` paces the arrivals. ``--steps`` also times steps of the first engine for the
simulator. Needs a GPU and vLLM 0.25 in PYTHONPATH, with nostall installed so that vLLM finds its
entry point.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from itertools import zip_longest
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.harness.result_file import head, save
from benchmarks.serving.engine.vllm_child import lengths_of, prompt_of
from nostall.attach.rollouts.engine import Engine, check_vllm
from nostall.core.errors import BadInput
from nostall.core.files.atomic import write_atomically

CHILD = "benchmarks.serving.engine.vllm_child"
"""Module of the process that holds one engine."""
ENGINE_NAME = re.compile(r"[A-Z_]+:\d+(:all)?(:linear)?")
GIB_BESIDE_CACHE = 7.0
"""Memory of an engine besides keys and values: weights (4 GiB), activations, graphs, context."""
MOST_CACHE_GIB = 20.0
MOST_EXPLAINED = 16
"""First differences of an engine that are explained by log probabilities."""


def engine_of(name: str, own: Path, options: argparse.Namespace) -> Engine:
    """The engine of a name such as CUSTOM:7:all."""
    backend, speculate, *served = name.split(":")
    environment = {}
    if "linear" in served:
        environment["NOSTALL_VLLM_LINEAR"] = str(options.linear)
    if "all" in served:
        environment["NOSTALL_VLLM_ATTENTION"] = "all"
    arguments = [CHILD, "--backend", backend, "--speculate", speculate, "--cache-gib",
                 str(options.cache_gib), "--traces", str(options.traces)]  # fmt: skip
    engine = Engine(name, own, arguments, environment)
    engine.record["speculate"] = int(speculate)
    return engine


def check_machine(options: argparse.Namespace) -> None:
    """Raise :class:`MissingPart` without vLLM or a GPU, and :class:`BadInput` for bad engines."""
    wrong = [name for name in options.engines if not ENGINE_NAME.fullmatch(name)]
    if wrong:
        raise BadInput(f"engine {wrong[0]!r}; allowed are BACKEND:TOKENS[:all][:linear]")
    if options.linear is None and any(name.endswith(":linear") for name in options.engines):
        raise BadInput("an engine with :linear needs --linear, a table of `nostall serving tune`")
    check_vllm()


def cache_gib(engines: int) -> float:
    """GiB of keys and values that each of so many engines gets."""
    import torch

    memory = float(torch.cuda.get_device_properties(0).total_memory) / 2**30
    return min(MOST_CACHE_GIB, 0.9 * memory / engines - GIB_BESIDE_CACHE)


def serve_rounds(engines: list[Engine], options: argparse.Namespace, until: float) -> None:
    """All rounds: each workload by all engines, one after the other, in an order that rotates."""
    turn = 0
    for seed in range(options.rounds):
        for workload in options.workloads:
            turn += 1
            running = [engine for engine in engines if not engine.problem]
            shift = turn % max(1, len(running))
            command = {"do": "serve", "workload": workload, "seed": seed}
            for engine in running[shift:] + running[:shift]:
                if monotonic() > until:
                    print(f"out of time before {workload}, round {seed}", flush=True)
                    return
                result = engine.ask(command | {"requests": options.requests})
                if result is not None:
                    engine.record["rounds"].append(result)
                write(engines, options)


def explain(engines: list[Engine], options: argparse.Namespace) -> None:
    """Log probabilities of the first engine where tokens of another one first differ from its."""
    base = engines[0]
    for engine in engines[1:]:
        differences = []
        for row in engine.record["rounds"]:
            same = [
                r for r in base.record["rounds"]
                if (r["workload"], r["seed"]) == (row["workload"], row["seed"])
            ]  # fmt: skip
            name = row["workload"].partition("@")[0]
            if not same or base.record["speculate"] != engine.record["speculate"]:
                continue
            lengths = lengths_of(name, options.traces, options.requests, 0)
            for index, (a, b) in enumerate(zip(same[0]["tokens"], row["tokens"], strict=True)):
                at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
                if at is not None:
                    prompt = prompt_of(lengths[index][0], row["seed"] * 100_000 + index)
                    differences.append((prompt + a[:at], a[at], b[at]))
        engine.record["differences"] = len(differences)
        chosen = differences[:MOST_EXPLAINED]
        if not chosen or base.problem:
            continue
        found = base.ask({"do": "logits", "prompts": [prompt for prompt, _, _ in chosen]}, 30.0)
        engine.record["explained"] = [
            {"tokens": [a, b], "log_probabilities": [p.get(str(a)), p.get(str(b))]}
            for (_, a, b), p in zip(chosen, found or [], strict=False)
        ]


def write(engines: list[Engine], options: argparse.Namespace) -> None:
    """Write the result file, without tokens."""
    records = [{**e.record, "engine": e.name, "problem": e.problem} for e in engines]
    save(options.out, kind="measured", cache_gib=options.cache_gib, engines=without_tokens(records))


def time_steps(engine: Engine, options: argparse.Namespace) -> None:
    """Time steps of an engine for the simulator."""
    points = engine.ask(
        {"do": "steps", "seconds": options.steps_s, "seed": 0}, options.steps_s + 30
    )
    if points:
        about = {key: engine.record[key] for key in ("gpu", "kv_tokens", "async")}
        document = {
            "format": "nostall-step-costs-1", **head(), **about,
            "engine": f"vllm {engine.record['vllm']}",
            "model": "Llama-3-8B's shape, 8 layers, random weights",
            "samples": [sample for point in points for sample in point["samples"]],
        }  # fmt: skip
        write_atomically(options.steps, json.dumps(document).encode())


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
            if base is not None and base["workload"] == row["workload"] and "tokens" in base:
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
                f"  {best['steps']} steps, build {best['build_us']:.0f} us"
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
    parser.add_argument("--linear", type=Path, help="table of `nostall serving tune`")
    parser.add_argument("--start-s", type=float, default=200.0, help="longest start of the engines")
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("--steps", type=Path, help="file of step costs to write")
    parser.add_argument("--steps-s", type=float, default=30.0)


def main(options: argparse.Namespace) -> int:
    """Run the engines; returns 1 if one had a problem."""
    check_machine(options)
    begin = monotonic()
    options.cache_gib = cache_gib(len(options.engines))
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        engines = [
            engine_of(name, Path(folder) / str(number), options)
            for number, name in enumerate(options.engines)
        ]
        try:
            for engine in engines:
                engine.connect(begin + options.start_s)
            print(f"{monotonic() - begin:.0f} s: started", flush=True)
            if options.steps and not engines[0].problem:
                time_steps(engines[0], options)
            serve_rounds(engines, options, begin + options.budget_s - 30)
            for engine in engines:
                if not engine.problem:
                    engine.record["counts"] = engine.ask({"do": "counts"}, 10.0)
            explain(engines, options)
            write(engines, options)
        finally:
            for engine in engines:
                engine.end()
    records = [{**engine.record, "engine": engine.name, "problem": engine.problem}
               for engine in engines]  # fmt: skip
    print(*table(records), sep="\n", flush=True)
    return 1 if any(engine.problem for engine in engines) else 0
