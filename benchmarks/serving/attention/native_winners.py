"""What do native schedules of the attention kernels gain over what Triton compiles?

    python -m benchmarks run serving.native_winners --out native.json --seconds 20 --budget-s 240
    python -m benchmarks run serving.native_winners --out portfolio.json --assemble-only

For each batch, ``nostall serving native`` searches each kernel of the plan in force (the rule's,
in an empty store). Then a fresh process times the attention step with what Triton compiles, with
the same again (the null) and with the store's cubins, loaded as a program loads them: in CUDA
graphs, taken in turns, with caches that rotate. Also a result that is not stored is compared, by
the last comparison of its search. Steps that the result file has are not measured again.
``--assemble-only`` needs no GPU: it assembles and verifies the
search's start for sm_90.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.result_file import load, save
from benchmarks.serving.attention.batches import batch

if TYPE_CHECKING:
    import torch

    from nostall.core.process import Channel
    from nostall.tuning.attention.job import NativeResult
    from nostall.tuning.attention.sources import AttentionStep

BATCHES = ("decode", "mixed", "verify")
HEADS = ("32/8", "28/4")
H100_SMS = 132
SERIES_SECONDS = 3.0
"""About how long the last comparison of a batch takes."""
OVERHEAD_SECONDS = 40.0
"""About how long a search takes besides its own seconds."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    parser.add_argument("--out", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--batches", default=",".join(BATCHES), help="batches, separated by commas")
    parser.add_argument("--heads", default=",".join(HEADS), help="query heads/KV heads")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of each search")
    parser.add_argument("--kernels", default="", help="kernels to search; default: all of a step")
    parser.add_argument("--budget-s", type=float, default=600.0, help="seconds in all")
    parser.add_argument("--assemble-only", action="store_true", help="without a GPU")


def step_of(name: str, heads: str, gpu: str = "") -> AttentionStep:
    """The step of a batch; ``gpu``: its name, empty for the plan of the rules."""
    from nostall.serving.attention.config import AttentionShape
    from nostall.serving.attention.rules import plan_for
    from nostall.serving.attention.winners.on_gpu import kind_of
    from nostall.serving.attention.winners.plan_store import plan_in_force
    from nostall.tuning.attention.sources import AttentionStep

    ragged = batch(name)
    query_heads, kv_heads = map(int, heads.split("/"))
    shape = AttentionShape(query_heads, kv_heads)
    kind = kind_of(ragged)
    plan = plan_in_force(shape, "bfloat16", kind, gpu, False) if gpu else plan_for(shape, kind)
    return AttentionStep(ragged, shape, plan, "bfloat16", f"{name} {heads}")


def searched(found: NativeResult, seconds: float) -> dict[str, Any]:
    """What the search of one kernel did, with the samples of its last comparison."""
    result, decision = found.result, found.result.decision
    timing = decision.outcome.timing if decision else None
    compared = decision.comparison if decision else None
    return {
        "kernel": found.source.kernel,
        "evaluations": result.search.evaluations,
        "rejected": result.search.rejected,
        "search_seconds": round(result.search.seconds, 2),
        "stored": found.row.id if found.row else None,
        "checked": decision.outcome.status if decision else "no candidate",
        "detail": decision.outcome.detail if decision else "",
        "verdict": compared.verdict if compared else None,
        "ratio": [compared.ratio, compared.low, compared.high] if compared else None,
        "null": [compared.null_low, compared.null_high] if compared else None,
        "samples_s": timing and [timing.original, timing.candidate, timing.null],
        "seconds": round(seconds, 1),
    }


def search(step: AttentionStep, seconds: float, names: Sequence[str]) -> list[dict[str, Any]]:
    """Search the kernels of a step with these names (empty: all) on the present GPU."""
    from nostall.store import Store
    from nostall.tuning.attention.job import Gpu, native_settings, tune_step

    begin = time.monotonic()
    rows = []
    settings, store = native_settings(seconds, seed=0), Store()
    for found in tune_step(step, Gpu.present(), settings, store, names=names):
        rows.append(searched(found, time.monotonic() - begin))
        begin = time.monotonic()
        print(f"  {rows[-1]['kernel']}: {rows[-1]['evaluations']} candidates, {rows[-1]['ratio']}")
    return rows


def deployed(channel: Channel, step: AttentionStep) -> None:
    """Send :func:`deployed_samples` of the present GPU."""
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    channel.send(deployed_samples(step, device, sms))


def deployed_samples(step: AttentionStep, device: torch.device, sms: int) -> dict[str, Any]:
    """Samples in us of the step as compiled, again (null), and with the store's cubins."""
    import torch

    from benchmarks.serving.attention.cuda_graphs import GraphedCalls, interleaved_us
    from nostall.attach.optimize import replace_cubin
    from nostall.serving.attention.winners.on_gpu import GpuBatch
    from nostall.tuning.attention.sources import attention_functions

    tensors = GpuBatch.of(step.ragged, step.shape, getattr(torch, step.dtype), device)
    calls = {name: GraphedCalls([tensors.run(step.plan, sms)]) for name in ("compiled", "null")}
    kernels = [
        compiled
        for function in attention_functions()
        for caches in function.device_caches.values()
        for compiled in caches[0].values()
    ]
    replaced = [compiled.name for compiled in kernels if replace_cubin(compiled)]
    # ``run`` compares the result with fp64 again.
    calls["native"] = GraphedCalls([tensors.run(step.plan, sms)])
    samples = interleaved_us(calls, 400, SERIES_SECONDS)
    per_step = {name: [us / len(tensors.caches) for us in row] for name, row in samples.items()}
    return {"replaced": replaced, "samples_us": per_step}


def measure_deployed(step: AttentionStep) -> dict[str, Any]:
    """:func:`deployed` in a process of its own, which has compiled nothing before."""
    from nostall.core.process import ChildProcess

    child = ChildProcess.spawn(deployed, step)
    try:
        return dict(child.receive(180.0))
    finally:
        child.reap(5.0)


def assembled(name: str, heads: str) -> list[dict[str, Any]]:
    """The portfolio of each kernel of a step, assembled and verified for sm_90."""
    from nostall.tuning.attention.job import check_portfolio
    from nostall.tuning.attention.sources import step_sources

    rows = []
    for source in step_sources(step_of(name, heads), H100_SMS):
        checked = check_portfolio(source)
        rows.append(
            {
                "kernel": source.kernel,
                "compiler": source.provenance["compiler"],
                "registers": checked.registers,
                "reproduces": checked.reproduces,
                "statuses": dict(checked.statuses),
                "codes": checked.codes,
                "refused": list(checked.unsafe),
            }
        )
    return rows


def table(results: list[dict[str, Any]]) -> str:
    """One line a batch: medians in us, compiled / native, compiled / null."""
    lines = []
    for result in results:
        for row in result.get("portfolio", ()):
            lines.append(f"{result['step']} {row['kernel']}: {row['statuses']}, {row['refused']}")
        if "deployed" in result:
            samples = result["deployed"]["samples_us"]
            medians = {name: statistics.median(row) for name, row in samples.items()}
            ratios = " ".join(
                f"{name} {medians['compiled'] / medians[name]:.4f}" for name in ("null", "native")
            )
            replaced = ", ".join(result["deployed"]["replaced"]) or "nothing stored"
            lines.append(f"{result['step']}: {medians['compiled']:.1f} us; {ratios}; {replaced}")
    return "\n".join(lines)


def main(options: argparse.Namespace) -> int:
    """Search and time within the budget; returns 1 if the verifier refused a candidate."""
    end = time.monotonic() + options.budget_s
    names, all_heads = options.batches.split(","), options.heads.split(",")
    results: list[dict[str, Any]] = load(options.out)["results"] if options.out.exists() else []
    done = {result["step"] for result in results if "error" not in result}
    results = [result for result in results if result["step"] in done]
    for name, heads in [(name, heads) for name in names for heads in all_heads]:
        label = f"{name} {heads}"
        if label in done:
            continue
        if time.monotonic() + options.seconds + OVERHEAD_SECONDS > end:
            print(f"out of time before {label}", flush=True)
            continue
        print(label, flush=True)
        result: dict[str, Any] = {"step": label}
        if options.assemble_only:
            result["portfolio"] = assembled(name, heads)
        else:
            kernels = options.kernels.split(",") if options.kernels else []
            result |= on_gpu(name, heads, options.seconds, kernels)
        results.append(result)
        save(options.out, results=results)
    print(table(results))
    refused = [row for result in results for row in result.get("portfolio", ()) if row["refused"]]
    return int(bool(refused) or not results)


def on_gpu(name: str, heads: str, seconds: float, names: Sequence[str]) -> dict[str, Any]:
    """The search of a batch's kernels and its deployed time; errors become part of the result."""
    from nostall.core.errors import NostallError
    from nostall.tuning.attention.job import Gpu

    gpu = Gpu.present().name
    step = step_of(name, heads, gpu)
    try:
        kernels = search(step, seconds, names)
        return {"gpu": gpu, "kernels": kernels, "deployed": measure_deployed(step)}
    except (NostallError, RuntimeError) as error:
        print(f"  {type(error).__name__}: {error}", flush=True)
        return {"gpu": gpu, "error": f"{type(error).__name__}: {error}"}
