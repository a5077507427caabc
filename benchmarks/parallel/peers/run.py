"""Plans of ``nostall plan``, captured, beside PyTorch's engines, on GPUs of one host.

    python -m benchmarks run parallel.peers --gpus 2 --out OUT.json
    python -m benchmarks run parallel.peers --device cpu --tiny --out OUT.json

A model runs in one set of processes: DDP, FSDP2 and tensor parallelism, each eager, compiled, and
compiled and captured, and the plan that ``nostall plan`` makes with ddp as its candidate, by the
trainer.  Blocks of steps of all arms take turns; a step has AdamW.  Losses of each arm are compared
with those of a single process, and an arm that fails is recorded with its error.

Models that OUT.json already has are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from benchmarks.harness.result_file import head, load, save
from nostall.core.measurement import Comparison

CLUSTER = """name = "one server"
[[servers]]
gpus = {gpus}
memory_gib = 120
link = {{ bandwidth_gbytes = 280, latency_us = 11 }}
"""
"""Bandwidth and latency of NVLink between two H200, as ``sharding.gpu_plans`` measured it."""
SAMPLES = {"gpt": 8, "llama": 8, "bert": 16, "moe": 16, "classifier": 4096}
TINY_SAMPLES = {name: 16 if name == "classifier" else 8 for name in SAMPLES}
CHOICE_ROUNDS = 2
"""Rounds by which the plan or its candidate is chosen; the others compare it."""
PREDICTED = ("predicted_step_s", "predicted_update_s")
CAPTURED = ("captured", "compiled and captured")
APART = 0.03
"""Relative difference of measured times from which the order of two plans counts."""
VARIABLES = {
    "MASTER_ADDR": "127.0.0.1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_GRAPH_REGISTER": "0",  # it would register each buffer of each graph
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "8",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="narrow models in single precision")
    parser.add_argument("--models", nargs="+", choices=list(SAMPLES), default=list(SAMPLES))
    parser.add_argument("--seconds", type=float, default=110.0, help="limit of a model")
    parser.add_argument("--planning-seconds", type=float, default=20.0, help="limit of one plan")
    parser.add_argument("--rounds", type=int, default=10, help="blocks of each arm")
    parser.add_argument("--steps", type=int, default=4, help="steps of a block")
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> None:
    found: dict[str, Any] = load(options.out)["models"] if options.out.exists() else {}
    with tempfile.TemporaryDirectory(prefix="nostall-peers-") as name:
        folder = Path(name)
        missing = [model for model in options.models if model not in found]
        planning = [_plan(model, folder, options) for model in missing]
        try:
            for model in missing:
                call = {k: v for k, v in head().items() if k in ("date", "command", "versions")}
                found[model] = {"call": call, **_run(model, folder, options)}
                save(
                    options.out, kind="measured", gpus=options.gpus, tiny=options.tiny,
                    device=device_name(options.device), steps_of_a_block=options.steps,
                    summary={name: summary(own["arms"]) for name, own in found.items()},
                    predictions=predictions(found),
                    models=found,
                )  # fmt: skip
                _print(model, found[model])
        finally:
            for process in planning:
                process.kill()


def _plan(model: str, folder: Path, options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start ``nostall plan`` for a model."""
    cluster = folder / "cluster.toml"
    cluster.write_text(CLUSTER.format(gpus=options.gpus))
    samples = (TINY_SAMPLES if options.tiny else SAMPLES)[model]
    module = f"{Path(__file__).with_name('models.py')}:{model}"
    command = [
        sys.executable, "-m", "nostall", "plan", module, "--planner", "sharding", "--cluster",
        str(cluster), "--global-batch", str(samples), "--hardware", "h200-measured", "--seconds",
        str(options.planning_seconds), "--out", str(folder / f"{model}.plan.json"),
    ]  # fmt: skip
    with (folder / f"{model}.plan.txt").open("wb") as log:
        return subprocess.Popen(
            command, env=environment(options.tiny, CUDA_VISIBLE_DEVICES="", NOSTALL_PLANNED="1"),
            stdout=log, stderr=log,
        )  # fmt: skip


def environment(tiny: bool, **more: str) -> dict[str, str]:
    """Variables of a process of a benchmark."""
    return {**os.environ, **VARIABLES, "NOSTALL_TINY": "1" if tiny else "0", **more}


def free_port() -> str:
    """A port of this machine that nothing uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _run(model: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What the ranks recorded of a model, also if they do not end by themselves."""
    out, plan = folder / f"{model}.json", folder / f"{model}.plan.json"
    own = {
        "model": model, "plan": str(plan), "out": str(out), "device": options.device,
        "seconds": options.seconds - 12.0, "rounds": options.rounds, "steps": options.steps,
    }  # fmt: skip
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.parallel.peers.rank"],
            env=environment(
                options.tiny, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(options.gpus),
                MASTER_PORT=port, NOSTALL_OPTIONS=json.dumps(own),
            ),
        )
        for rank in range(options.gpus)
    ]  # fmt: skip
    until = monotonic() + options.seconds
    while monotonic() < until and any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):  # the others would wait for it
            sleep(1.0)
            break
        sleep(0.1)
    ended = [rank.poll() for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.wait()
    record = json.loads(out.read_text()) if out.exists() else {"arms": [], "losses": []}
    record["exit_codes"] = ended
    if plan.exists():
        document = json.loads(plan.read_text())
        record["plan"] = {
            key: document.get(key) for key in ("planner", *PREDICTED, "predicted_speedup")
        }
        record["candidates"] = {
            c["planner"]: {key: c.get(key) for key in PREDICTED}
            for c in document.get("candidates") or ()
        }
    else:
        record["planning"] = (folder / f"{model}.plan.txt").read_text()[-2000:]
    return record


def device_name(kind: str) -> str:
    import torch

    return torch.cuda.get_device_name() if kind == "cuda" else "cpu"


def summary(arms: list[dict[str, Any]]) -> dict[str, Any]:
    """The chosen plan beside the fastest peer, the launched plan and the bound."""
    timed = {(a["arm"], a["mode"]): a["ms"] for a in arms if a.get("ms")}
    peers = [k for k in timed if k[0] in ("ddp", "fsdp2", "tp") and "re" not in k[1].split(", ")]
    peers = [k for k in peers if "again" not in k[1] and "without" not in k[1]]
    own = [k for k in timed if k[0].startswith(("plan", "candidate"))]
    null = next((k for k in timed if "again" in k[1]), None)
    if not peers or not own or null is None or len(timed[null]) <= CHOICE_ROUNDS:
        return {}
    chosen = min(own, key=lambda k: statistics.median(timed[k][:CHOICE_ROUNDS]))
    plans = [k for k in own if k[0] == "plan"]
    best = min(peers, key=lambda k: statistics.median(timed[k]))
    result: dict[str, Any] = {
        "chosen": ", ".join(chosen), "fastest_peer": ", ".join(best),
        "peer_over_chosen": ratio(timed, best, chosen, null),
    }  # fmt: skip
    if plans:
        plan = min(plans, key=lambda k: statistics.median(timed[k][:CHOICE_ROUNDS]))
        result |= {"plan": ", ".join(plan), "peer_over_plan": ratio(timed, best, plan, null)}
    for name, key in (
        ("launched_over_chosen", ("plan", "launched")),
        ("bound_over_chosen", ("ddp", "compiled and captured, without reductions")),
    ):
        if key in timed:
            result[name] = ratio(timed, key, chosen, null)
    return result


def predictions(models: dict[str, Any]) -> dict[str, Any]:
    """Modelled times of captured plans, the optimiser's included, beside measured ones.

    The regret of a model is how much longer the plan of the least modelled time takes than the
    fastest of all arms, peers included.
    """
    plans: list[dict[str, Any]] = []
    regrets: dict[str, float] = {}
    for model, record in models.items():
        own = _predicted(model, record)
        plans += own
        times = [statistics.median(arm["ms"]) for arm in record["arms"]
                 if arm.get("ms") and "without" not in arm["mode"]]  # fmt: skip
        if own:
            chosen = min(own, key=lambda plan: plan["predicted_ms"])
            regrets[model] = chosen["measured_ms"] / min(times) - 1
    return errors_of(plans, regrets)


def errors_of(plans: list[dict[str, Any]], regrets: dict[str, float]) -> dict[str, Any]:
    """Errors and orders of plans with ``model``, ``predicted_ms`` and ``measured_ms``."""
    errors = [abs(plan["predicted_ms"] / plan["measured_ms"] - 1) for plan in plans]
    if not errors:
        return {}
    return {
        "plans": plans,
        "mean_error": statistics.mean(errors),
        "worst_error": max(errors),
        "tau_b": tau_b(plans, 0.0),
        "tau_b_apart": tau_b(plans, APART),
        "regrets": regrets,
    }


def _predicted(model: str, record: dict[str, Any]) -> list[dict[str, Any]]:
    """The captured plans of a model; of one plan, the fastest way to capture it."""
    listed = {f"candidate {name}": own for name, own in record.get("candidates", {}).items()}
    rows = []
    for name, own in {"plan": record.get("plan"), **listed}.items():
        arms = [a for a in record["arms"] if a["arm"] == name and a["mode"] in CAPTURED]
        measured = [statistics.median(arm["ms"]) for arm in arms if arm.get("ms")]
        if isinstance(own, dict) and measured and own.get(PREDICTED[1]) is not None:
            predicted = 1e3 * sum(own[key] for key in PREDICTED)
            rows.append({"model": model, "plan": name, "predicted_ms": predicted,
                         "measured_ms": min(measured)})  # fmt: skip
    return rows


def tau_b(plans: list[dict[str, Any]], apart: float) -> dict[str, Any]:
    """Kendall's tau-b over pairs of plans of one model whose measured times differ by a share."""
    agree = differ = tied = 0
    for a, b in itertools.combinations(plans, 2):
        near = abs(a["measured_ms"] / b["measured_ms"] - 1) <= apart
        if a["model"] != b["model"] or near:
            continue
        sign = (a["predicted_ms"] - b["predicted_ms"]) * (a["measured_ms"] - b["measured_ms"])
        agree, differ, tied = agree + (sign > 0), differ + (sign < 0), tied + (sign == 0)
    pairs = agree + differ
    root = math.sqrt(pairs * (pairs + tied))
    return {"tau": (agree - differ) / root if root else None, "pairs": pairs + tied}


def ratio(
    timed: dict[tuple[str, str], list[float]], first: Any, second: Any, null: Any,
    skipped: int = CHOICE_ROUNDS,
) -> dict[str, Any]:  # fmt: skip
    """Ratio of times in the same rounds, without the ``skipped`` first ones."""
    count = min(len(timed[k]) for k in (first, second, null))
    count = min(count, len(timed[null]) - skipped)
    eager = (null[0], null[1].removesuffix(", again"))
    a, b = timed[first][-count:], timed[second][-count:]
    own = Comparison.from_samples(a, b, kind="measured")
    nulls = Comparison.from_samples(timed[eager][-count:], timed[null][-count:], kind="measured")
    return {"ratio": own.ratio, "interval": [own.low, own.high], "null": [nulls.low, nulls.high]}


def _print(model: str, record: dict[str, Any]) -> None:
    print(f"{model}: exit codes {record['exit_codes']}, plan {record.get('plan')}")
    for arm in record["arms"]:
        name = f"{arm['arm']}, {arm['mode']}"
        if "error" in arm:
            print(f"  {name:50} {arm['error'][:120]}")
        elif arm["ms"]:
            error = "" if arm["loss_error"] is None else f"{arm['loss_error']:.1e}"
            print(f"  {name:50}{statistics.median(arm['ms']):9.2f} ms  {len(arm['ms'])}  {error}")
    for key, own in summary(record["arms"]).items():
        text = own if isinstance(own, str) else f"{own['ratio']:.3f} {own['interval']}"
        print(f"  {key}: {text}")
    if "planning" in record:
        print(record["planning"][-400:])
