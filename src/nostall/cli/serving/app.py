"""The commands ``nostall serving``: batches, task tables and the simulation of a trace."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from nostall.attach.rollouts.engine import check_vllm
from nostall.attach.rollouts.job import NAMES, RESULT_FILE, RolloutJob, run_job
from nostall.attach.rollouts.model import Model
from nostall.attach.rollouts.turns import default_steps
from nostall.attach.rollouts.workload import Rollout
from nostall.cli.options.help_panels import command_group
from nostall.cli.serving.search import native, search
from nostall.cli.serving.simulation import simulate_trace
from nostall.cli.serving.tables import show, write_batch
from nostall.cli.terminal.console import (
    Format,
    FormatOption,
    QuietOption,
    out,
    show_json,
    show_table,
)
from nostall.cli.terminal.progress import stage_bar
from nostall.cli.tuning.runs import create_run_folder
from nostall.core.run import Run
from nostall.serving.gemm.layers import MODELS, model_sizes

MINUTE = 60.0


def tune(
    model: Annotated[
        str, typer.Argument(help=f"One of {', '.join(MODELS)}, or the path of a config.json.")
    ],
    output: Annotated[Path, typer.Option("--out", help="Table file to write (JSON).")],
    ranks: Annotated[int, typer.Option(min=1, help="Tensor-parallel GPUs of the model.")] = 1,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    minutes: Annotated[float, typer.Option(min=0.1, help="Minutes for all layers.")] = 5.0,
) -> None:
    """Choose how each linear layer of a model runs for each number of rows M.

    An entry other than cuBLAS is taken only where the 95 % interval of a second, fresh measurement
    says that it is faster. The table holds for this GPU and these versions of PyTorch and Triton.
    """
    layers = model_sizes(model).layers(ranks, dtype)
    # torch and Triton are imported late: errors of the arguments come first.
    from nostall.gpu.clock import ReplayClock
    from nostall.serving.errors import current_gpu
    from nostall.serving.gemm.gpu_layer import GpuLayer, library_versions
    from nostall.serving.gemm.linear import Scratch
    from nostall.serving.gemm.table import save_tables
    from nostall.serving.gemm.tune import GRID, Tuner

    gpu, versions = current_gpu(), library_versions()
    begin, share = time.monotonic(), minutes * MINUTE / len(layers)
    scratch, tables = Scratch.on("cuda"), []
    for index, (name, shape) in enumerate(layers.items()):
        out.print(f"{name}: N={shape.columns} K={shape.depth}")
        tuner = Tuner(
            ReplayClock(), gpu, tuple(versions.items()), begin + share * (index + 1), out.print
        )
        tables.append(tuner.tune(GpuLayer.of(shape, max(GRID), scratch)))
        save_tables(output, tables)
    faster = sum(row.ratio > 1.0 for table in tables for row in table.rows)
    out.print(f"{output}: {faster} rows are faster than F.linear; all others run F.linear")


LABELS = {"FLASH_ATTN": "FLASH_ATTN", "CUSTOM": "nostall"}


def rollouts(
    model: Annotated[
        Path, typer.Option(help="config.json of a Hugging Face model, or its folder.")
    ],
    prompts: Annotated[int, typer.Option(min=1, help="Prompts.")] = 32,
    samples: Annotated[int, typer.Option(min=1, help="Samples of each prompt.")] = 8,
    shared: Annotated[int, typer.Option(min=0, help="Tokens of a prompt.")] = 2048,
    new: Annotated[int, typer.Option(min=1, help="Tokens of a sample.")] = 384,
    system: Annotated[
        int, typer.Option(min=0, help="Of the prompt's tokens, those that all prompts share.")
    ] = 0,
    rounds: Annotated[
        int, typer.Option(min=1, max=1000, help="Turns of each engine, at least.")
    ] = 8,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Decode steps of a turn; default: 64, or those of a short sample."
        ),
    ] = None,
    out_dir: Annotated[
        Path | None,
        typer.Option("--out", help="Run directory to create; default: a new one in runs/."),
    ] = None,
    format: FormatOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Measure what reading shared prompts once gains in vLLM, on this GPU.

    Two engines run the model with random weights and prefix caching: vLLM's FLASH_ATTN, and nostall
    with its default choice. Prompts are cached before the clock starts; all samples then decode at
    once, and the engines take turns, or run one by one if only one fits into the GPU's memory.
    """
    workload = Rollout(prompts, samples, shared, new, system)
    job = RolloutJob(workload, Model.read(model), rounds, steps or default_steps(new))
    check_vllm()
    import torch

    free_bytes, _ = torch.cuda.mem_get_info()
    job.memory.engines(free_bytes / float(1 << 30))  # An error comes before the run directory.
    command = shlex.join(["nostall", *sys.argv[1:]])
    path = out_dir or create_run_folder(f"rollouts-{job.workload.text}")
    run = Run.create(path, command, job.settings())
    found = _measure(job, run, free_bytes, has_bar=not quiet and format is Format.TABLE)
    if format is Format.JSON:
        show_json({"run": str(run.path), **found})
        return
    _show(job, found, model, run)


def _measure(job: RolloutJob, run: Run, free_bytes: int, has_bar: bool) -> dict[str, Any]:
    """Measure into a run directory, which says so if it did not end."""
    bar = stage_bar(enabled=has_bar)
    task = bar.add_task("starting", total=1.0)
    with run:
        try:
            with bar:
                found = run_job(
                    job,
                    free_bytes,
                    lambda share, stage: bar.update(task, completed=share, description=stage),
                )
        except BaseException as error:  # raised again; the run must not seem to go on
            is_interrupt = isinstance(error, KeyboardInterrupt)
            run.finish("interrupted" if is_interrupt else "failed", {"kind": "measured"})
            raise
        run.write(RESULT_FILE, json.dumps(found, indent=1).encode())
        kept = ("kind", "gpu", "vllm", "ratio", "comparison", "verdict", "engines")
        run.finish("done", {key: found[key] for key in kept})
    return found


def _show(job: RolloutJob, found: dict[str, Any], model: Path, run: Run) -> None:
    """Print the rates of both engines, their ratio, and what to do next."""
    rows = []
    for name in NAMES:
        figures = found["engines"][name]
        keys = ("tokens_per_s", "generation_tokens_per_s", "with_prompts_tokens_per_s")
        cells = [f"{figures[key]:,.0f}" if figures[key] else "-" for key in keys]
        rows.append((LABELS[name], cells[0], f"{figures['step_ms']:.2f}", *cells[1:]))
    show_table(
        f"{job.workload.name} tokens, {found['model']}, measured",
        ("engine", "tokens/s", "step (ms)", "whole generation", "with prompts"),
        rows,
    )
    out.print(f"{found['gpu']}, vLLM {found['vllm']}")
    compared = found["comparison"]
    out.print(
        f"nostall / FLASH_ATTN: {compared['ratio']:.3f} "
        f"[{compared['low']:.3f}, {compared['high']:.3f}], "
        f"null [{compared['null_low']:.3f}, {compared['null_high']:.3f}]: {found['verdict']}"
    )
    if not found["in_turns"]:
        out.print("the engines ran one by one, because only one fits into the GPU's memory")
    _show_counts(found["counts"] or {})
    out.print(f"result:   {run.path / RESULT_FILE}")
    out.print(f"next:     {shlex.join(serve_command(model, found['verdict']))}")


def serve_command(model: Path, verdict: str) -> list[str]:
    """How to serve the model with the engine that the comparison's verdict asks for."""
    choice = "CUSTOM" if verdict == "faster" else "FLASH_ATTN"
    return ["vllm", "serve", str(model), "--attention-backend", choice]


def _show_counts(counts: dict[str, Any]) -> None:
    """Print which steps nostall served, and why it left others."""
    served = ", ".join(f"{count} {kind}" for kind, count in counts.get("served", {}).items())
    out.print(f"steps served by nostall: {served or 'none'}")
    prefixes = counts.get("shared prefixes")
    if prefixes:
        found = f"{prefixes['with shared prefixes']} of {prefixes['steps']}"
        out.print(f"of these with shared prefixes: {found}")
    for reason, count in counts.get("left to vLLM", {}).items():
        out.print(f"left to FLASH_ATTN: {count} {reason}")


app = command_group()
app.command("show")(show)
app.command("batch")(write_batch)
app.command("tune")(tune)
app.command("search")(search)
app.command("native")(native)
app.command("rollouts")(rollouts)
app.command("simulate")(simulate_trace)
