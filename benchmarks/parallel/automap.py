"""Plans of Auto-MAP's three explorers and of rules beside the integer program's, on GPUs of a host.

    python -m benchmarks run parallel.automap --gpus 2 --out OUT.json
    python -m benchmarks run parallel.automap --device cpu --tiny --out OUT.json

Plans are made on the CPU first; with ``--plans FOLDER`` they stay there, and a later call uses
them.  Blocks of steps of all plans of a model take turns, compiled and as CUDA graphs (launched on
a CPU), with AdamW.  Losses are compared with those of one process, and modelled times with measured
ones.  Models that OUT.json already has are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from benchmarks.harness.result_file import head, load, save
from benchmarks.parallel.peers.run import (
    CLUSTER,
    SAMPLES,
    TINY_SAMPLES,
    device_name,
    environment,
    errors_of,
    free_port,
    ratio,
)

MODELS = tuple(SAMPLES)
EXPLORED = ("bert", "classifier")
"""The models for which Auto-MAP's explorers make plans."""
RULES = ("data-parallel", "fsdp", "megatron", "tensor-parallel")
GIVEN = "sharding"
"""The integer program's plan."""
SECONDS_PER_EXPLORER = 5.0
SET_UP_S = 14.0
"""Seconds that are left at least when a plan is set up."""
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
    found: dict[str, Any] = load(options.out)["models"] if options.out.exists() else {}
    missing = [model for model in options.models if model not in found]
    with tempfile.TemporaryDirectory(prefix="nostall-automap-") as name:
        folder = options.plans or Path(name)
        planning = {
            model: _start("plan", model, folder, options, CUDA_VISIBLE_DEVICES="")
            for model in missing
            if not (folder / model / "done").exists()
        }
        for model in missing:
            _wait(planning.get(model, []), options)
            if options.plan_only:
                continue
            port = free_port()
            _wait(
                _start("measure", model, folder, options, options.gpus, MASTER_PORT=port), options
            )
            if not (folder / model / "measured.json").exists():
                print(f"{model}: no rank wrote a record")
                continue
            document = json.loads((folder / model / "measured.json").read_text())
            call = {k: v for k, v in head().items() if k in ("date", "command", "versions")}
            found[model] = {"call": call, "ratios": ratios(document["arms"]), **document}
            save(
                options.out, kind="measured", gpus=options.gpus, tiny=options.tiny,
                device=device_name(options.device), steps_of_a_block=options.steps,
                predictions=predictions(found), models=found,
            )  # fmt: skip
            for row in document["arms"]:
                ms = row.get("error") or (median(row["ms"]) if row["ms"] else "not timed")
                print(model, row["arm"], row["mode"], ms, row.get("predicted_ms"), row.get("notes"))
            print(json.dumps(found[model]["ratios"]))
        if found:
            print(json.dumps({k: v for k, v in predictions(found).items() if k != "plans"}))


def predictions(models: dict[str, Any]) -> dict[str, Any]:
    """Modelled times of the plans, the optimiser's included, beside measured ones.

    The regret of a model is how much longer the plan of the least modelled time takes than the
    fastest of its plans.
    """
    rows = [
        {"model": model, "plan": arm["arm"], "predicted_ms": arm["predicted_ms"],
         "measured_ms": median(arm["ms"])}
        for model, record in models.items()
        for arm in record["arms"]
        if arm.get("ms") and "predicted_ms" in arm and "again" not in arm["mode"]
    ]  # fmt: skip
    regrets = {}
    for model in models:
        own = [row for row in rows if row["model"] == model]
        if own:
            first = min(own, key=lambda row: row["predicted_ms"])
            regrets[model] = first["measured_ms"] / min(r["measured_ms"] for r in own) - 1
    return errors_of(rows, regrets)


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


Processes = list[subprocess.Popen[bytes]]


def _start(
    task: str, model: str, folder: Path, options: argparse.Namespace, ranks: int = 1, **more: str
) -> Processes:
    """Start a task of this module in processes of its own."""
    own = {
        "model": model, "folder": str(folder / model), "gpus": options.gpus, "tiny": options.tiny,
        "device": options.device, "seconds": options.seconds, "rounds": options.rounds,
        "steps": options.steps,
    }  # fmt: skip
    return [
        subprocess.Popen(
            [sys.executable, "-m", __name__, task, json.dumps(own)],
            env=environment(
                options.tiny, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), **more
            ),
        )
        for rank in range(ranks)
    ]  # fmt: skip


def _wait(processes: Processes, options: argparse.Namespace) -> None:
    """Wait for processes; those that do not end in time are killed, and what they wrote counts."""
    until = monotonic() + options.seconds + 20
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, until - monotonic()))
    for process in processes:
        process.kill()
        process.wait()


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
    from nostall.parallel.sharding.planners.rules import RULES as ALL_RULES
    from nostall.parallel.sharding.planners.sharding import (
        Options,
        plan_by_rule,
        plan_sharding,
        update_s,
    )
    from nostall.workload.hardware.file import load_hardware

    folder, gpus = Path(own["folder"]), own["gpus"]
    folder.mkdir(parents=True, exist_ok=True)
    samples = (TINY_SAMPLES if own["tiny"] else SAMPLES)[own["model"]]
    cluster = parse_cluster(CLUSTER.format(gpus=gpus))
    rates, job = device_rates(load_hardware("h200-measured")), JOBS[own["model"]]()
    prices = Prices(capture(job, samples, (gpus,)).graph, ClusterMesh(cluster, (gpus,)), rates)
    limit = min(cluster.memory)
    options = Options(limit, STATE_FACTOR, 10.0)
    best, _ = plan_sharding(prices, options)
    plans = [best, *(plan_by_rule(prices, ALL_RULES[rule], options) for rule in RULES)]
    if own["model"] in EXPLORED:
        explorers = Options(limit, STATE_FACTOR, 4 * SECONDS_PER_EXPLORER)
        plans += plan_automap(prices, explorers)[1]
    documents: dict[str, dict[str, Any]] = {}
    different: list[Any] = []
    for found in plans:
        if found is not None and found.fits(limit) and found.assignment not in different:
            different.append(found.assignment)
            documents[found.name] = plan_document(found, [], "benchmark", samples, STATE_FACTOR)
    failed = {}
    try:
        micro_batch = max(1, samples // (4 * gpus))
        profile = modelled_profile(Model(job), cluster, rates, micro_batch)
        work = Workload(profile, cluster, samples, micro_batch, STATE_FACTOR)
        explored = explore_pipeline(work, 2, seconds=SECONDS_PER_EXPLORER)
        evaluation = evaluate_plan(work, explored.plan, "automap")
        layers = profile.layers
        largest = max(
            sum(layer.parameter_bytes for layer in layers[stage.first : stage.end])
            for stage in explored.plan.stages
        )
        documents["automap-pipeline"] = {
            **pipeline_document(evaluation), "predicted_step_s": evaluation.timeline.iteration_s,
            "predicted_update_s": update_s(STATE_FACTOR * largest, STATE_FACTOR, rates),
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
        BOTH,
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

        if session.left() > SET_UP_S:
            set_up(session, arms, is_gpu, (BOTH,) if is_gpu else (LAUNCHED,))
    rounds(session)
    session.save()
    if rank == 0:
        document = json.loads(out.read_text())
        document["not_planned"] = json.loads((folder / "done").read_text())
        for arm in document["arms"]:
            if "error" in arm:
                continue
            modelled = json.loads((folder / f"{arm['arm']}.plan.json").read_text())
            keys = ("predicted_step_s", "predicted_update_s")
            arm["predicted_ms"] = 1e3 * sum(modelled[key] for key in keys)
        out.write_text(json.dumps(document))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # NCCL does not end a communicator while a graph uses it


if __name__ == "__main__":
    {"plan": plan, "measure": measure}[sys.argv[1]](json.loads(sys.argv[2]))
