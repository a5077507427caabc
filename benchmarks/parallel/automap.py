"""Plans of Auto-MAP's three explorers beside the integer program's, on GPUs of a host.

    python -m benchmarks run parallel.automap --gpus 2 --out OUT.json
    python -m benchmarks run parallel.automap --device cpu --tiny --out OUT.json

Plans are made on the CPU first; with ``--plans FOLDER`` they stay there, and a later call uses
them.  Blocks of steps of all plans of a model take turns, launched and, without pipelines, as CUDA
graphs; nothing is compiled, and a step has AdamW.  Losses are compared with those of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from benchmarks.harness.result_file import save
from benchmarks.parallel.peers.run import (
    CLUSTER,
    SAMPLES,
    TINY_SAMPLES,
    device_name,
    environment,
    free_port,
    ratio,
)

MODELS = ("bert", "classifier")
GIVEN = "sharding"
"""The integer program's plan."""
SECONDS_PER_EXPLORER = 5.0
STATE_FACTOR = 4.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="narrow models in single precision")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=28.0, help="limit of a model on GPUs")
    parser.add_argument("--plans", type=Path, help="folder of the plans; default: a new one")
    parser.add_argument("--plan-only", action="store_true", help="make the plans and stop")
    parser.add_argument("--rounds", type=int, default=8, help="blocks of each plan")
    parser.add_argument("--steps", type=int, default=4, help="steps of a block")
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="nostall-automap-") as name:
        folder = options.plans or Path(name)
        for model in options.models:
            if not (folder / model / "done").exists():
                _call("plan", model, folder, options, CUDA_VISIBLE_DEVICES="")
        if options.plan_only:
            return
        found = {}
        for model in options.models:
            port = free_port()
            _call("measure", model, folder, options, ranks=options.gpus, MASTER_PORT=port)
            document = json.loads((folder / model / "measured.json").read_text())
            found[model] = {"ratios": ratios(document["arms"]), **document}
            save(
                options.out, kind="measured", gpus=options.gpus, tiny=options.tiny,
                device=device_name(options.device), steps_of_a_block=options.steps, models=found,
            )  # fmt: skip
            for row in document["arms"]:
                print(model, row["arm"], row["mode"], row.get("error") or median(row["ms"]))
            print(json.dumps(found[model]["ratios"]))


def ratios(arms: list[dict[str, Any]]) -> dict[str, Any]:
    """How many times as long steps of each other plan take as those of the integer program's that
    run in the same way."""
    timed = {(a["arm"], a["mode"]): a["ms"] for a in arms if a.get("ms")}
    null = next((key for key in timed if key[1].endswith("again")), None)
    return {
        ", ".join(key): ratio(timed, key, (GIVEN, key[1]), null, 0)
        for key in timed
        if null is not None and key[0] != GIVEN and (GIVEN, key[1]) in timed
    }


def _call(
    task: str, model: str, folder: Path, options: argparse.Namespace, ranks: int = 1, **more: str
) -> None:
    """Run a task of this module in processes of its own."""
    own = {
        "model": model, "folder": str(folder / model), "gpus": options.gpus, "tiny": options.tiny,
        "device": options.device, "seconds": options.seconds, "rounds": options.rounds,
        "steps": options.steps,
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, task, json.dumps(own)],
            env=environment(
                options.tiny, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), **more
            ),
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        for process in processes:
            process.wait(options.seconds + 60)
    finally:
        for process in processes:
            process.kill()


def plan(own: dict[str, Any]) -> None:
    """Write the plans of a model; a plan that is not possible is left out, with the reason."""
    from benchmarks.parallel.peers.models import MODELS as JOBS
    from nostall.cli.planning.sharding import device_rates
    from nostall.core.errors import NostallError
    from nostall.papers.automap.pipeline import explore_pipeline, modelled_profile
    from nostall.papers.automap.planner import plan_automap
    from nostall.parallel.cluster import parse_cluster
    from nostall.parallel.evaluation import evaluate_plan
    from nostall.parallel.module import Model
    from nostall.parallel.plan import Workload
    from nostall.parallel.plan_file import plan_document as pipeline_document
    from nostall.parallel.sharding.capture.operators import capture
    from nostall.parallel.sharding.cost.device_mesh import ClusterMesh
    from nostall.parallel.sharding.cost.prices import Prices
    from nostall.parallel.sharding.plan_file import plan_document
    from nostall.parallel.sharding.planners.sharding import Options, plan_sharding
    from nostall.workload.hardware.file import load_hardware

    folder, gpus = Path(own["folder"]), own["gpus"]
    folder.mkdir(parents=True, exist_ok=True)
    samples = (TINY_SAMPLES if own["tiny"] else SAMPLES)[own["model"]]
    cluster = parse_cluster(CLUSTER.format(gpus=gpus))
    rates, job = device_rates(load_hardware("h200-measured")), JOBS[own["model"]]()
    prices = Prices(capture(job, samples, (gpus,)).graph, ClusterMesh(cluster, (gpus,)), rates)
    limit = min(cluster.memory)
    best, _ = plan_sharding(prices, Options(limit, STATE_FACTOR, 10.0))
    _, explored = plan_automap(prices, Options(limit, STATE_FACTOR, 4 * SECONDS_PER_EXPLORER))
    documents = {
        own.name: plan_document(own, [], "benchmark", samples, STATE_FACTOR)
        for own in (best, *explored)
    }
    failed = {}
    try:
        micro_batch = max(1, samples // (4 * gpus))
        profile = modelled_profile(Model(job), cluster, rates, micro_batch)
        work = Workload(profile, cluster, samples, micro_batch, STATE_FACTOR)
        found = explore_pipeline(work, 2, seconds=SECONDS_PER_EXPLORER)
        evaluation = evaluate_plan(work, found.plan, "automap")
        documents["automap-pipeline"] = {
            **pipeline_document(evaluation), "predicted_step_s": evaluation.timeline.iteration_s,
        }  # fmt: skip
    except NostallError as error:
        failed["automap-pipeline"] = str(error)
    for name, document in documents.items():
        (folder / f"{name}.plan.json").write_text(json.dumps(document))
    (folder / "done").write_text(json.dumps(failed))


def measure(own: dict[str, Any]) -> None:
    """One rank: steps of all plans of a model, in turns."""
    import torch
    import torch.distributed as dist

    from benchmarks.parallel.peers.arms import Arms, Plan
    from benchmarks.parallel.peers.rank import (
        CAPTURED,
        LAUNCHED,
        Session,
        reference,
        rounds,
        set_up,
    )
    from nostall.parallel.execute.parts.any_plan import load_any_plan

    is_gpu, rank, folder = own["device"] == "cuda", int(os.environ["RANK"]), Path(own["folder"])
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_gpu else "gloo", timeout=timedelta(seconds=60))
    out = folder / "measured.json"
    session = Session(
        own["model"], folder, device, monotonic() + own["seconds"], out, own["steps"],
        own["rounds"],
    )  # fmt: skip
    session.expected = reference(session)
    files = sorted(folder.glob("*.plan.json"), key=lambda p: not p.name.startswith(GIVEN))
    for file in files:
        name = file.name.removesuffix(".plan.json")

        def arms(name: str = name, file: Path = file) -> Arms:
            # Pipelines trace the module on a CPU.
            plan = load_any_plan(file)
            return Plan(name, plan, session.model, device, on_cpu="pipeline" in name)

        # Messages between stages are not captured.
        modes = (LAUNCHED,) if "pipeline" in name or not is_gpu else (LAUNCHED, CAPTURED)
        set_up(session, arms, False, modes)
    rounds(session)
    session.save()
    if rank == 0:
        document = json.loads(out.read_text())
        document["not_planned"] = json.loads((folder / "done").read_text())
        for arm in document["arms"]:
            if "error" in arm:
                continue
            modelled = json.loads((folder / f"{arm['arm']}.plan.json").read_text())
            arm["predicted_ms"] = 1e3 * modelled["predicted_step_s"]
        out.write_text(json.dumps(document))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # NCCL does not end a communicator while a graph uses it


if __name__ == "__main__":
    {"plan": plan, "measure": measure}[sys.argv[1]](json.loads(sys.argv[2]))
