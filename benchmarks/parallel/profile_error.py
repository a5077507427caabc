"""Why profiles of the GPT are too fast on several GPUs: whole passes against sums of layers.

    python -m benchmarks run parallel.profile_error --gpus 4 --out OUT.json

Times a forward and a backward pass of each model of ``parallel.predicted_vs_measured`` at the
samples of a micro-batch and of its part on each of four replicas: the sum of the profiled layers,
the whole pass as the GPU runs it, and the processor's time to launch it.  First on one GPU while
the others wait, then on all of them at once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.result_file import save
from benchmarks.parallel.gpu.models import MODELS
from nostall.parallel.module import Model
from nostall.parallel.module.job import to_device
from nostall.parallel.module.profiler import profile_model

PASSES, WARM_UPS = 12, 4
SUSTAINED_S = 2.0
"""Seconds of passes in a row before the sustained time: a GPU's clock falls with its power."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.gpus, options.device, options.tiny, options.models, folder)
        ranks = [
            context.Process(target=_rank, args=(rank, *arguments)) for rank in range(options.gpus)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise SystemExit("a rank failed")
        records = json.loads((Path(folder) / "records.json").read_text())
    save(options.out, kind="measured", gpus=options.gpus, records=records)
    for record in records:
        print(record)


def _rank(
    rank: int, count: int, device_type: str, tiny: bool, models: list[str], folder: str
) -> None:
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank,
                            world_size=count)  # fmt: skip
    records: list[dict[str, Any]] = []
    for name in models:
        model = Model(MODELS[name](tiny))
        samples = model.job.samples
        for own in dict.fromkeys((samples, max(1, samples // 4))):
            for all_at_once in (False, True):
                dist.barrier()
                measured = _measure(model, own, device) if rank == 0 or all_at_once else None
                gathered: list[Any] = [None] * count
                dist.all_gather_object(gathered, measured)
                found = [g for g in gathered if g is not None]
                worst = {key: max(g[key] for g in found) for key in found[0]}
                head = {"model": name, "samples": own, "gpus_at_once": len(found)}
                records.append({**head, **worst})
        if rank == 0:
            (Path(folder) / "records.json").write_text(json.dumps(records))
    dist.barrier()
    dist.destroy_process_group()


def _measure(model: Model, samples: int, device: torch.device) -> dict[str, float]:
    """Seconds of the profiled layers together, of the whole pass, and of its launch."""
    profile = profile_model(model, samples, device, 12)
    module = model.job.module.to(device)
    inputs, targets = to_device(model.job.example_batch(samples), device)

    def one_pass() -> None:
        model.job.loss(module(*inputs), targets).backward()
        for parameter in module.parameters():
            parameter.grad = None

    def in_a_row(count: int) -> float:
        _wait(device)
        start = perf_counter()
        for _ in range(count):
            one_pass()
        _wait(device)
        return (perf_counter() - start) / count

    whole, launch = [], []
    for _ in range(WARM_UPS + PASSES):
        _wait(device)
        start = perf_counter()
        one_pass()
        launch.append(perf_counter() - start)
        _wait(device)
        whole.append(perf_counter() - start)
    following = in_a_row(PASSES)
    in_a_row(max(1, int(SUSTAINED_S / following)) if device.type == "cuda" else 1)
    return {
        "layers_s": sum(layer.forward_s + layer.backward_s for layer in profile.layers),
        "whole_s": statistics.median(whole[WARM_UPS:]),
        "following_s": following,
        "sustained_s": in_a_row(PASSES),
        "launch_s": statistics.median(launch[WARM_UPS:]),
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
