"""One rank of ``benchmarks.parallel.predicted_vs_measured``: measures, then runs the points that it is handed."""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import signal
import statistics
import sys
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.parallel.gpu_models import MODELS
from nostall.core.files import write_atomically
from nostall.parallel.execute.measure_links import measured_cluster
from nostall.parallel.execute.run import RunOptions, run_plan
from nostall.parallel.execute.slow_links import SlowLinks
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
    cuda = options["device"] == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    more: dict[str, Any] = {}
    if cuda:
        torch.cuda.set_device(device)
        more = {"device_id": device}
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=60), **more)
    models = {name: Model(make(options["tiny"])) for name, make in MODELS.items()}
    if not (folder / "measured").exists():
        _measure(models, device, folder)
    dist.barrier()
    number = -2
    began = monotonic()
    while monotonic() - began < IDLE_S:
        if (order := _next(folder)) is None or order["number"] == number:
            sleep(0.01)
            continue
        number = order["number"]
        if number < 0:
            break
        _point(number, order["point"], models, options, device, folder)
        began = monotonic()
    dist.destroy_process_group()


def _next(folder: Path) -> Any:
    try:
        return json.loads((folder / "next.json").read_text())
    except OSError:
        return None


def _measure(models: dict[str, Model], device: torch.device, folder: Path) -> None:
    """Links between all ranks; layers on rank 0, while the others wait."""
    cuda = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30 if cuda else 8.0
    text = measured_cluster("measured", device, round(0.95 * memory, 1))
    rank = dist.get_rank()
    if rank == 0:
        (folder / "profiles").mkdir(exist_ok=True)
        for name, model in models.items():
            profile = profile_model(model, model.job.samples, device, name=name)
            save_profile(profile, folder / "profiles" / f"{name}.json")
        about = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name(device) if cuda else "cpu",
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "",
        }
        write_atomically(folder / "about.json", json.dumps(about).encode())
        write_atomically(folder / "cluster.toml", text.encode())
    dist.barrier()
    if rank == 0:
        (folder / "measured").touch()


def _point(
    number: int,
    point: dict[str, Any],
    models: dict[str, Model],
    options: dict[str, Any],
    device: torch.device,
    folder: Path,
) -> None:
    work, plan, _ = load_plan(Path(point["plan"]))
    slow = SlowLinks(options["slow_gbytes"] * 1e9) if point["links"] == "slow" else None
    if slow is not None:
        slow = SlowLinks(slow.bytes_per_s, float(work.cluster.latency[0, -1]))
    began = monotonic()
    ran = run_plan(
        models[point["model"]],
        work,
        plan,
        RunOptions(WARM_UPS + options["steps"], device, engine=point["engine"], slow=slow),
    )
    if dist.get_rank() == 0:
        counted = sorted(ran.seconds[WARM_UPS:])
        record = {
            "measured_s": statistics.median(counted),
            "quartiles_s": [counted[len(counted) // 4], counted[3 * len(counted) // 4]],
            "peak_bytes": ran.peak_bytes,
            "loss": ran.losses[0],
            "wall_s": round(monotonic() - began, 2),
        }
        write_atomically(folder / f"ran-{number}.json", json.dumps(record).encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
