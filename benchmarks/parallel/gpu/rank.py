"""One rank of ``benchmarks.parallel.predicted_vs_measured``: measures, then runs points.

The main process writes each point to ``next.json`` in the shared folder.
"""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import signal
import statistics
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.parallel.gpu.models import MODELS
from benchmarks.parallel.gpu.slow_links import SlowLinks, emulated
from nostall.core.files.atomic import write_atomically
from nostall.parallel.execute.measure_links import measured_cluster
from nostall.parallel.execute.run import RunOptions, run_plan
from nostall.parallel.module import Model
from nostall.parallel.module.profiler import profile_model
from nostall.parallel.plan_file import load_plan
from nostall.parallel.profile import save_profile

WARM_UPS = 3
IDLE_S = 120.0


def main(folder: Path) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    options = json.loads(os.environ["NOSTALL_OPTIONS"])
    rank = int(os.environ["RANK"])
    is_cuda = options["device"] == "cuda"
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    group_options: dict[str, Any] = {}
    if is_cuda:
        torch.cuda.set_device(device)
        group_options = {"device_id": device}
    else:
        torch.set_num_threads(1)
    backend = "nccl" if is_cuda else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=60), **group_options)
    models = {name: Model(make(options["tiny"])) for name, make in MODELS.items()}
    if not (folder / "measured").exists():
        _measure(models, device, folder)
    dist.barrier()
    number = -2
    last_point = monotonic()
    while monotonic() - last_point < IDLE_S:
        if (request := _read_request(folder)) is None or request["number"] == number:
            sleep(0.01)
            continue
        number = request["number"]
        if number < 0:
            break
        _run_point(number, request["point"], models, options, device, folder)
        last_point = monotonic()
    dist.destroy_process_group()


def _read_request(folder: Path) -> Any:
    try:
        return json.loads((folder / "next.json").read_text())
    except OSError:
        return None


def _measure(models: dict[str, Model], device: torch.device, folder: Path) -> None:
    """Measure the links between all ranks, and the layers on rank 0 while the others wait."""
    is_cuda = device.type == "cuda"
    memory_gib = torch.cuda.get_device_properties(device).total_memory / 2**30 if is_cuda else 8.0
    cluster_text = measured_cluster("measured", device, round(0.95 * memory_gib, 1))
    rank = dist.get_rank()
    if rank == 0:
        (folder / "profiles").mkdir(exist_ok=True)
        for name, model in models.items():
            profile = profile_model(model, model.job.samples, device, name=name)
            save_profile(profile, folder / "profiles" / f"{name}.json")
        about = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if is_cuda else "",
        }
        write_atomically(folder / "about.json", json.dumps(about).encode())
        write_atomically(folder / "cluster.toml", cluster_text.encode())
    dist.barrier()
    if rank == 0:
        (folder / "measured").touch()


def _run_point(
    number: int,
    point: dict[str, Any],
    models: dict[str, Model],
    options: dict[str, Any],
    device: torch.device,
    folder: Path,
) -> None:
    work, plan, _ = load_plan(Path(point["plan"]))
    links, engine = nullcontext(), point["engine"]
    if point["links"] == "slow":
        slow = SlowLinks(options["slow_gbytes"] * 1e9, float(work.cluster.latency[0, -1]))
        links, engine = emulated(slow, device), "p2p"
    start = monotonic()
    run = RunOptions(WARM_UPS + options["steps"], device, engine=engine)
    with links:
        result = run_plan(models[point["model"]], work, plan, run)
    if dist.get_rank() == 0:
        seconds = sorted(result.seconds[WARM_UPS:])
        record = {
            "measured_s": statistics.median(seconds),
            "quartiles_s": [seconds[len(seconds) // 4], seconds[3 * len(seconds) // 4]],
            "launch_s": statistics.median(result.launch_seconds[WARM_UPS:]),
            "peak_bytes": result.peak_bytes,
            "loss": result.losses[0],
            "wall_s": round(monotonic() - start, 2),
        }
        write_atomically(folder / f"ran-{number}.json", json.dumps(record).encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
