"""How fast does vLLM decode samples of shared prompts with nostall's plug-in?

    python -m benchmarks run serving.rollouts --out rollouts.json --traces FOLDER --set shared
    python -m benchmarks run serving.rollouts --out rollouts.json --workloads 32x8@2048+384

A workload is PROMPTSxSAMPLES@SHARED+NEW; ``/SYSTEM`` behind it are the tokens that all prompts
share, ``~GROWTH`` those by which the shared part grows from history to history, and a trace in the
place of NEW gives each request its own number of generated tokens. REQUESTS@TRACE/PARTS+NEW are
neighbours of a trace with prefix hashes. Each request has 16 tokens of its own. Two engines of
Llama-3-8B's shape (random weights, 32 layers, prefix caching on) start at once on one GPU:
FLASH_ATTN as vLLM starts it, and CUSTOM, the plug-in with its default. Prompts are cached before
the clock starts; all requests then decode at once. The engines take turns of ``--steps`` decode
steps, through two or more equal generations, until each had ``--rounds``; equal turns of one engine
are the null. At the end the kernels of eight steps of each workload are recorded. Needs a GPU and
vLLM 0.25 in PYTHONPATH, with nostall installed so that vLLM finds its entry point; ``--tiny`` is a
dry run with vLLM's CPU build.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from benchmarks.harness.result_file import head, save
from benchmarks.serving.engine.model import LLAMA
from benchmarks.serving.engine.rollout_workloads import (
    LONGEST,
    Workload,
    compare,
    parse_workload,
    plan_of,
    profile,
)
from nostall.attach.rollouts.engine import Engine, check_vllm
from nostall.attach.rollouts.job import Settings, arguments_of, rate, rates, started
from nostall.attach.rollouts.turns import measure
from nostall.core.errors import BadInput

AZURE = "AzureLLMInferenceTrace_conv.csv"
SETS: Mapping[str, Sequence[str]] = {
    "shared": (
        "32x8@2048+384", "1x64@4096+384", "16x16@4096+256", f"32x8@2048+{AZURE}", "32x8@512+256",
        "128x1@1024+192", "16x8@3072+256/2048", "8x32@8192+256", "64x4@1024+256",
    ),
    "others": (
        f"128x8@2048+{AZURE}", "256x1@1024+192", "64x1@1024+192", "32x1@1024+192", "8x1@1024+192",
        "1x1@1024+192", "8x8@2048+160~512", "64@mooncake_conversation.jsonl/4+192",
    ),
}  # fmt: skip
"""Workloads, the most important first."""
TINY: Mapping[str, Any] = {
    **LLAMA, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "torch_dtype": "float32",
}  # fmt: skip
PROFILE_S = 10.0
"""Most seconds in which a workload is profiled."""
END_S = 20.0
"""Seconds in which the engines give their counts and end."""


CHILD = "benchmarks.serving.engine.rollout_child"
"""Module of the process that holds one engine."""
_V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}


@dataclass(frozen=True)
class Kind:
    """How an engine computes attention."""

    backend: str
    """Name of vLLM's enumeration."""
    environment: Mapping[str, str]
    cascade: bool = False
    """Whether vLLM may read the prefix that a whole batch shares once."""


KINDS: Mapping[str, Kind] = {
    "FLASH_ATTN": Kind("FLASH_ATTN", {}),
    "CUSTOM": Kind("CUSTOM", {}),
    "ALL": Kind("CUSTOM", {"NOSTALL_VLLM_ATTENTION": "all"}),
    "TRITON_ATTN": Kind("TRITON_ATTN", {}),
    "CASCADE": Kind("FLASH_ATTN", _V1, cascade=True),
    "V1": Kind("CUSTOM", _V1),
    "CPU_ATTN": Kind("CPU_ATTN", {}),
    "CPU_AGAIN": Kind("CPU_ATTN", {}),
}
"""Engines by name. FLASH_ATTN: as vLLM starts it; CUSTOM: the plug-in with its default; ALL: with
all steps; CASCADE and V1: FLASH_ATTN and CUSTOM in the V1 model runner, which alone has cascade
attention; CPU_ATTN and CPU_AGAIN: vLLM's CPU build, to try a measurement without a GPU."""


def engine_of(options: argparse.Namespace, name: str, own: Path, settings: Settings) -> Engine:
    """The engine of a name of :data:`KINDS`."""
    kind = KINDS[name]
    arguments = [CHILD, *arguments_of(kind.backend, own, settings)]
    arguments += ["--cache-dtype", options.cache_dtype]
    arguments += ["--cascade"] if kind.cascade else []
    arguments += ["--traces", str(options.traces.resolve())] if options.traces else []
    environment = dict(kind.environment)
    if options.compiled is not None:
        environment["VLLM_CACHE_ROOT"] = str(options.compiled.resolve() / name)
    return Engine(name, own, arguments, environment)


def equal_tokens(ours: Mapping[str, Any], base: Mapping[str, Any]) -> float | None:
    """Share of the requests whose first tokens are equal in both engines; None: unknown."""
    for one, other in zip(ours.get("generations", []), base.get("generations", []), strict=False):
        if "compared" in one and "compared" in other:
            pairs = zip(one["compared"], other["compared"], strict=False)
            equal = [float(a == b) for a, b in pairs]
            return sum(equal) / max(1, len(equal))
    return None


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    parser.add_argument("--out", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--engines", nargs="+", choices=KINDS, default=["FLASH_ATTN", "CUSTOM"])
    parser.add_argument(
        "--set", choices=SETS, default="shared", help="workloads without --workloads"
    )
    parser.add_argument("--workloads", nargs="+", help="in the place of --set")
    parser.add_argument("--traces", type=Path, help="folder of the traces that workloads name")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each engine, at least")
    parser.add_argument("--steps", type=int, default=64, help="decode steps of a turn")
    parser.add_argument("--layers", type=int, default=LLAMA["num_hidden_layers"])
    parser.add_argument("--cache-gib", type=float, default=40.0, help="of each engine")
    parser.add_argument("--cache-dtype", default="auto", help="vLLM's name of it, such as fp8")
    parser.add_argument("--compiled", type=Path, help="folder that keeps what vLLM compiles")
    parser.add_argument("--start-s", type=float, default=200.0, help="longest start of the engines")
    parser.add_argument("--budget-s", type=float, default=540.0, help="of the whole run")
    parser.add_argument("--profile-s", type=float, default=60.0, help="of the budget, for kernels")
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU")


def main(options: argparse.Namespace) -> int:
    """Run the engines; returns 1 if one had a problem."""
    begin = monotonic()
    end = begin + options.budget_s - END_S
    if options.rounds < 1 or options.steps < 1:
        raise BadInput(f"--rounds {options.rounds} --steps {options.steps}; give 1 or more")
    if not options.tiny:
        check_vllm()
    texts = options.workloads or SETS[options.set]
    workloads = [parse_workload(text, options.traces) for text in texts]
    for workload in workloads:
        workload.requests()  # Errors of traces come before the engines start.
    plans = [plan_of(workload, options.rounds, options.steps) for workload in workloads]
    model = TINY if options.tiny else {**LLAMA, "num_hidden_layers": options.layers}
    settings = Settings(json.dumps(model), options.cache_gib, LONGEST)
    make = partial(engine_of, options)
    with started(options.engines, settings, options.start_s, make) as engines:
        _say(begin, "started")
        for workload, plan in zip(workloads, plans, strict=True):
            until = end - options.profile_s
            if monotonic() > until - END_S:
                _say(begin, f"out of time before {workload.text}")
                continue
            measure(workload, engines, plan, until - END_S)
            _say(begin, line(workload, engines))
            _write(engines, model, options)
        for engine in engines:
            engine.record["counts"] = engine.ask({"do": "counts"}, 10.0)
        _write(engines, model, options)
        for workload in workloads:
            if workload.new is not None and monotonic() < end - PROFILE_S:
                profile(workload, engines)
        _write(engines, model, options)
    print(*(line(workload, engines) for workload in workloads), sep="\n", flush=True)
    for engine in engines:
        print(engine.name, engine.record.get("counts"), engine.problem[-1500:], flush=True)
    return int(any(engine.problem for engine in engines))


def _say(begin: float, text: str) -> None:
    print(f"[{monotonic() - begin:.0f} s] {text}", flush=True)


def line(workload: Workload, engines: list[Engine]) -> str:
    """One line of a workload: medians in tokens a second, and ratios to the first engine's."""
    rows = [_row(engine.record, workload.text) for engine in engines]
    base, cells = rows[0], []
    for engine, row in zip(engines, rows, strict=True):
        if not row or not row["turns"]:
            cells.append(f"{engine.name} none")
            continue
        is_ragged = workload.new is None
        value = rate(row["turns"]) if is_ragged else median(rates(row))
        cell = f"{engine.name} {value:.0f}"
        if row is not base and base and base["turns"]:
            found = compare(row, base, is_ragged=is_ragged)
            cell += (
                f" {found.ratio:.3f} [{found.low:.3f}, {found.high:.3f}] null"
                f" [{found.null_low:.3f}, {found.null_high:.3f}] {len(row['turns'])} turns"
            )
        shown = row.get("profile", {})
        if "busy_us" in shown:
            share, step = shown["attention_us"] / shown["busy_us"], shown["busy_us"]
            cell += f" (attention {share:.0%} of {step / shown['steps'] / 1e3:.1f} ms)"
        cells.append(cell)
    return f"{workload.text}: {', '.join(cells)}"


def _row(record: dict[str, Any], text: str) -> dict[str, Any] | None:
    return next((row for row in record["rounds"] if row["workload"] == text), None)


def _write(engines: list[Engine], model: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Write the result file; first tokens are kept as the share that equals the first engine's."""
    records = []
    for engine in engines:
        rows = []
        for row in engine.record["rounds"]:
            base = _row(engines[0].record, row["workload"])
            generations = [
                {key: value for key, value in about.items() if key != "compared"}
                for about in row["generations"]
            ]
            equal = equal_tokens(row, base) if base else None
            rows.append({**row, "generations": generations, "equal_first_tokens": equal})
        about = {**engine.record, "engine": engine.name, "problem": engine.problem}
        records.append({**about, "rounds": rows})
    save(
        options.out,
        **head(),
        kind="measured",
        cache_gib=options.cache_gib,
        model=model,
        engines=records,
    )
