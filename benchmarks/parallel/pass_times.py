"""Where iterations of the GPT take longer than predicted: each pass on a GPU, and the messages.

    NCCL_NVLS_ENABLE=0 python -m benchmarks run parallel.pass_times --gpus 4 --out OUT.json

Runs plans of ``parallel.predicted_vs_measured`` with CUDA events around each forward and backward
pass, so that passes that last longer than their profile are told from gaps between passes.  Plans
of several stages also run with receives that start one operation ahead, beside an operator.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.harness.result_file import save
from benchmarks.parallel.gpu.models import MODELS
from benchmarks.parallel.gpu.plans import MICRO_BATCHES
from nostall.parallel.cluster import parse_cluster
from nostall.parallel.execute.engines import p2p
from nostall.parallel.execute.engines.stage_passes import StagePasses
from nostall.parallel.execute.measure_links import measured_cluster
from nostall.parallel.execute.run import RunOptions, run_plan
from nostall.parallel.module import Model
from nostall.parallel.module.profiler import profile_model
from nostall.parallel.plan import Plan, Policy, Workload
from nostall.parallel.planners import Effort, make_plan
from nostall.parallel.simulate import simulated_s
from nostall.parallel.simulate.costs import costs

WARM_UPS, STEPS = 3, 7
PLANS: tuple[tuple[str, str, Policy | None], ...] = (
    ("even 1f1b", "even", "1f1b"),
    ("gpipe 1f1b", "gpipe", "1f1b"),
    ("even gpipe", "even", "gpipe"),
    ("data-parallel", "data-parallel", None),
)
"""Name, planner and order."""


SETTINGS = {"received when needed": False, "received one operation ahead": True}
"""Whether receives start ahead, by the name of the setting."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=120.0, help="no plan begins later")
    parser.add_argument("--out", type=Path, required=True)


def main(given: argparse.Namespace) -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "NCCL_NVLS_ENABLE": "0"}
        options = (given.gpus, given.device, given.tiny, perf_counter() + given.seconds, folder)
        ranks = [context.Process(target=_rank, args=(r, *options)) for r in range(given.gpus)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        path = Path(folder) / "records.json"
        records = json.loads(path.read_text()) if path.exists() else []
    save(given.out, kind="measured", gpus=given.gpus, records=records)
    for record in records:
        print(_line(record))
    if any(rank.exitcode for rank in ranks):
        raise SystemExit("a rank failed")


def _line(record: dict[str, Any]) -> str:
    stages = "  ".join(
        f"{s['forward_s'] * 1e3:.2f}/{s['predicted_forward_s'] * 1e3:.2f}"
        f"+{s['backward_s'] * 1e3:.2f}/{s['predicted_backward_s'] * 1e3:.2f}"
        for s in record["ranks"]
    )
    return (
        f"{record['plan']:14}{record['setting']:37} predicted {record['predicted_s'] * 1e3:.1f} "
        f"measured {record['measured_s'] * 1e3:.1f} ms; forward + backward, measured/profile: "
        f"{stages}"
    )


def _rank(rank: int, count: int, device_type: str, tiny: bool, until: float, folder: str) -> None:
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    extra: dict[str, Any] = {}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        extra = {"device_id": device}
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=count, **extra
    )
    model = Model(MODELS["gpt"](tiny))
    work = _workload(model, device)
    records: list[dict[str, Any]] = []
    for setting, is_ahead in SETTINGS.items():
        for name, planner, policy in PLANS if not is_ahead else PLANS[:-1]:
            if _is_over(until, device):
                continue
            plan = make_plan(work, planner, Effort.for_workload(work, seconds=4))
            if policy:
                plan = replace(plan, policy=policy, in_flight=None)
            measured = _run(model, work, plan, is_ahead, device)
            records.append({"plan": name, "setting": setting, **measured})
            if rank == 0:
                (Path(folder) / "records.json").write_text(json.dumps(records))
    dist.barrier()
    os._exit(0)


def _is_over(until: float, device: torch.device) -> bool:
    """Whether rank 0 has no time left; the same on all ranks."""
    flag = torch.tensor(float(perf_counter() > until), device=device)
    dist.broadcast(flag, 0)
    return bool(flag)


def _workload(model: Model, device: torch.device) -> Workload:
    """The measured profile, of rank 0, on the measured cluster."""
    cluster = parse_cluster(measured_cluster("measured", device, 80.0))
    profiles = [profile_model(model, model.job.samples, device) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(profiles, 0)
    (profile,) = profiles
    assert profile is not None
    assert profile.batch is not None
    return Workload(profile, cluster, MICRO_BATCHES * profile.batch)


def _run(
    model: Model, work: Workload, plan: Plan, is_ahead: bool, device: torch.device
) -> dict[str, Any]:
    """Iterations of a plan, with the medians of its passes on each rank."""
    clock = _Clock(device)
    with ExitStack() as stack:
        stack.enter_context(patch.object(p2p, "AHEAD_WITHIN_SERVER", is_ahead))
        stack.enter_context(clock.around_passes())
        options = RunOptions(WARM_UPS + STEPS, device, engine="p2p")
        result = run_plan(model, work, plan, options)
    modelled, rank = costs(work, plan), dist.get_rank()
    stage = next(s for s, own in enumerate(plan.stages) if rank in own.gpus)
    own = {
        "forward_s": clock.median_s("forward"),
        "backward_s": clock.median_s("backward"),
        "forward_launch_s": statistics.median(clock.launches["forward"]),
        "backward_launch_s": statistics.median(clock.launches["backward"]),
        "predicted_forward_s": modelled.forward[stage],
        "predicted_backward_s": modelled.backward[stage],
    }
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return {
        "predicted_s": simulated_s(work, plan),
        "measured_s": statistics.median(result.seconds[WARM_UPS:]),
        "launch_s": statistics.median(result.launch_seconds[WARM_UPS:]),
        "ranks": ranks,
    }


@dataclass
class _Clock:
    """Time stamps around passes."""

    device: torch.device
    marks: dict[str, list[tuple[Any, Any]]] = field(
        default_factory=lambda: {"forward": [], "backward": []}
    )
    launches: dict[str, list[float]] = field(
        default_factory=lambda: {"forward": [], "backward": []}
    )
    """Seconds of the processor for each pass; it waits in these while the GPU's queue is full."""

    @contextmanager
    def around_passes(self) -> Iterator[None]:
        """Record the start and the end of each pass of a stage."""
        with ExitStack() as stack:
            for kind in self.marks:
                timed = self._timed(kind, getattr(StagePasses, kind))
                stack.enter_context(patch.object(StagePasses, kind, timed))
            yield

    def _timed(self, kind: str, action: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            start, began = self._stamp(), perf_counter()
            result = action(*given)
            self.launches[kind].append(perf_counter() - began)
            self.marks[kind].append((start, self._stamp()))
            return result

        return run

    def _stamp(self) -> Any:
        if self.device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def median_s(self, kind: str) -> float:
        """Median of the passes of the second half of the iterations."""
        marks = self.marks[kind][len(self.marks[kind]) // 2 :]
        if self.device.type != "cuda":
            return statistics.median(end - start for start, end in marks)
        torch.cuda.synchronize(self.device)
        return statistics.median(start.elapsed_time(end) * 1e-3 for start, end in marks)
