"""The command ``nostall serving tune``: the table over M of a model's linear layers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from nostall.cli.terminal.console import out
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
    from nostall.serving.gemm.gpu_layer import GpuLayer, current_gpu, library_versions
    from nostall.serving.gemm.linear import new_scratch
    from nostall.serving.gemm.table import save_tables
    from nostall.serving.gemm.tune import GRID, Tuner

    gpu, versions = current_gpu(), library_versions()
    begin, share = time.monotonic(), minutes * MINUTE / len(layers)
    scratch, tables = new_scratch(), []
    for index, (name, shape) in enumerate(layers.items()):
        out.print(f"{name}: N={shape.columns} K={shape.depth}")
        tuner = Tuner(
            ReplayClock(), gpu, tuple(versions.items()), begin + share * (index + 1), out.print
        )
        tables.append(tuner.tune(GpuLayer.of(shape, max(GRID), scratch)))
        save_tables(output, tables)
    faster = sum(row.ratio > 1.0 for table in tables for row in table.rows)
    out.print(f"{output}: {faster} rows are faster than F.linear; all others run F.linear")
