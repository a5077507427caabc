"""From what workload_gpu measured: fitted efficiencies, a hardware preset, errors of predictions.

    python -m benchmarks run workload.fit benchmarks/workload/results/gpu.json \\
        --out benchmarks/workload/results/fit.json --preset h200-measured \\
        --ranks tests/unit/workload/h200/ddp_rank?.json.gz

The efficiencies are fitted to single operators, copies and AllReduces.  The steps of whole models
are predicted from their modules and compared with their profiles; nothing is fitted to those.  The
traces of all ranks tell how much of a rank's communication was waiting for the others.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.result_file import save
from nostall.core.files import write_atomically
from nostall.workload import Architecture, Hardware, Job, load_hardware, step
from nostall.workload.hardware import Fit, OperatorFit, fit_curve, fit_operator
from nostall.workload.jobs.operators import Operator, OperatorKind
from nostall.workload.jobs.record import Resource
from nostall.workload.model.traffic import ring_allreduce
from nostall.workload.modules import ModuleFeatures, job_of
from nostall.workload.timeline.meetings import meetings
from nostall.workload.traces.ranks import read_ranks

BASE = "h200-dgx"
PRECISION = "bf16"
BUCKET = 25 * 2**20
"""Bytes of gradients that DistributedDataParallel exchanges at a time, by default."""
MOST_OTHER = 0.1
"""Cases in which operators of another kind move a larger share of the bytes are left out."""
PARTS = ("data", "compute", "memory")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("measured", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", help="write a preset of this name beside the others")
    parser.add_argument("--ranks", type=Path, nargs="*", help="one step of every rank of a model")


def main(given: argparse.Namespace) -> None:
    body = json.loads(given.measured.read_text())
    found = {k: v for k, v in body["steps"].items() if "failed" not in v}
    flat = load_hardware(BASE)
    operators = fitted_operators(found["operators"]["operators"], flat)
    links = fitted_links(found, flat)
    fitted = replace(
        flat,
        operators={k: f.curve for k, f in operators.items()},
        efficiency={**flat.efficiency, **{r: f.curve for r, f in links.items()}},
    )
    models = [
        judged(one, flat, fitted, found.get(f"counters {one['model']}"))
        for name, one in found.items()
        if name.startswith("model ")
    ]
    ranks = found.get("ranks", {"models": [], "world": 1})
    exchanged = [exchange(one, ranks["world"], flat, fitted) for one in ranks["models"]]
    met = together(given.ranks, fitted) if given.ranks else None
    if given.preset:
        place = resources.files("nostall.workload.hardware").joinpath("presets")
        source = f"fitted to {given.measured.name} ({body['date'][:10]}, {body['about']['device']})"
        base = place.joinpath(f"{BASE}.toml").read_text()
        text = preset(base, given.preset, fitted, tuple(links), source)
        write_atomically(Path(str(place)) / f"{given.preset}.toml", text.encode())
    save(
        given.out,
        about=body["about"],
        measured_on=body["date"],
        failed={k: v["failed"] for k, v in body["steps"].items() if "failed" in v},
        operators={k.value: _said(f) for k, f in operators.items()},
        links={r.value: _said(f) for r, f in links.items()},
        models=models,
        exchanged=exchanged,
        **({"all_ranks": met} if met else {}),
    )
    show(models, exchanged)
    print(met)


def fitted_operators(
    records: Sequence[Mapping[str, Any]], hardware: Hardware
) -> dict[OperatorKind, OperatorFit]:
    """A curve for each kind of operator that was measured."""
    found = {}
    for kind in OperatorKind:
        own = [r for r in records if r["kind"] == kind and r["share_of_other_kinds"] <= MOST_OTHER]
        if len(own) < 2:
            continue
        found[kind] = fit_operator(
            [Operator(kind, r["case"], r["calls"], r["flops"], r["bytes"]) for r in own],
            [r["seconds"] for r in own],
            hardware.rate(Resource.COMPUTE, PRECISION),
            hardware.memory,
        )
    return found


def fitted_links(found: Mapping[str, Any], hardware: Hardware) -> dict[Resource, Fit]:
    """Curves of the copies to the GPU and, where several GPUs were there, of their AllReduce."""
    copies = found["operators"]["copies_to_gpu"]
    sizes, seconds = [c["bytes"] for c in copies], [c["seconds"] for c in copies]
    links = {Resource.PCIE: fit_curve(sizes, seconds, hardware.pcie)}
    if "ranks" in found:
        ranks = found["ranks"]
        moved = [ring_allreduce(ranks["world"], r["bytes"]) for r in ranks["allreduce"]]
        times = [r["seconds"] for r in ranks["allreduce"]]
        links[Resource.NVLINK] = fit_curve(moved, times, hardware.nvlink)
    return links


def features(described: Mapping[str, Any]) -> ModuleFeatures:
    rows = tuple(
        Operator(**{**row, "kind": OperatorKind(row["kind"])}) for row in described["operators"]
    )
    return ModuleFeatures(**{**described, "operators": rows})


def judged(
    one: Mapping[str, Any], flat: Hardware, fitted: Hardware, counters: Mapping[str, Any] | None
) -> dict[str, Any]:
    """A model's step, predicted from its module, against its profile and the clock."""
    about = features(one["described"])
    job = job_of(about, one["model"], Architecture.SINGLE, batch=one["samples"])
    parts = one["measured"]["parts_seconds"]
    clock = median(one["seconds"])
    result: dict[str, Any] = {
        "model": one["model"],
        "measured_ms": {**{p: _ms(parts[p]) for p in PARTS}, "step": _ms(clock)},
        "idle_ms": _ms(sum(v for k, v in parts.items() if k.startswith("idle"))),
        "torch_kernel_ms": _ms(one["measured"]["torch_device_seconds"]),
    }
    for name, hardware in (("flat", flat), ("fitted", fitted)):
        said = step(job, hardware)
        result[f"{name}_ms"] = {**{p: _ms(said.part(p)) for p in PARTS}, "step": _ms(said.total)}
        result[f"{name}_error"] = {
            **{p: _error(said.part(p), parts[p]) for p in PARTS},
            "step": _error(said.total, clock),
        }
    if counters is not None:
        kinds = counters["kinds"]
        counted = {k: kinds.get(k, {"bytes": 0.0, "seconds": 0.0}) for k in ("compute", "memory")}
        described = {"compute": about.product_bytes, "memory": about.memory_bytes}
        result["dram_gigabytes"] = {k: round(v["bytes"] / 1e9, 3) for k, v in counted.items()}
        result["ncu_ms"] = {k: _ms(v["seconds"]) for k, v in counted.items()}
        result["described_gigabytes"] = {k: round(v / 1e9, 3) for k, v in described.items()}
        result["bytes_error"] = {k: _error(described[k], v["bytes"]) for k, v in counted.items()}
    return result


def exchange(
    one: Mapping[str, Any], world: int, flat: Hardware, fitted: Hardware
) -> dict[str, Any]:
    """Seconds that gradients take, summed over buckets and without regard to what hides them."""
    about = features(one["described"])
    gradients = about.dense_bytes + about.embedding_bytes  # DDP exchanges tables as a whole
    buckets = max(1, -(-int(gradients) // BUCKET))
    job = Job(
        one["model"],
        Architecture.ALLREDUCE_LOCAL,
        replicas=world,
        flops=1.0,
        dense_bytes=gradients / buckets,
        precision=PRECISION,
    )
    measured = one["measured"]["communication_seconds"]
    result = {"model": one["model"], "gradients_mb": round(gradients / 1e6, 1), "buckets": buckets}
    for name, hardware in (("flat", flat), ("fitted", fitted)):
        said = buckets * step(job, hardware).weights
        result |= {f"{name}_ms": _ms(said), f"{name}_error": _error(said, measured)}
    exposed = one["measured"]["parts_seconds"]["weights"]
    return {**result, "measured_ms": _ms(measured), "measured_exposed_ms": _ms(exposed)}


def together(paths: Sequence[Path], fitted: Hardware) -> dict[str, Any]:
    """The AllReduces of one step on all ranks: waiting taken out, predicted bucket by bucket."""
    found = [m for m in meetings(read_ranks(paths).recordings) if "AllReduce" in m.name]
    world = len(paths)
    said = sum(
        fitted.curve(Resource.NVLINK).seconds(ring_allreduce(world, m.message), fitted.nvlink)
        for m in found
    )
    transfer = sum(m.transfer for m in found)
    return {
        "traces": [path.name for path in paths],
        "buckets_mb": [round(m.message / 1e6, 2) for m in found],
        "rank_ms": [_ms(sum(m.seconds[r] for m in found)) for r in range(world)],
        "waited_ms": [_ms(sum(m.waits[r] for m in found)) for r in range(world)],
        "transfer_ms": _ms(transfer),
        "fitted_ms": _ms(said),
        "fitted_error": _error(said, transfer),
    }


def preset(base: str, name: str, fitted: Hardware, links: Sequence[Resource], source: str) -> str:
    """The text of a hardware file: the rates of ``base`` with fitted efficiencies."""
    lines = []
    which = ", ".join(links)
    for line in base.splitlines():
        if line.startswith("name ="):
            line = f'name = "{name}"'
        elif line.startswith("efficiency ="):
            lines.append(f'operators = "{source}, in bf16"')
            line = f'efficiency = "{which}: {source}; others: flat 70 %"'
        lines.append(line)
    for resource in links:
        curve = fitted.curve(resource)
        lines += ["", f"[efficiency.{resource}]", f"share = {curve.share:.4g}"]
        lines.append(f'overhead = "{curve.overhead:.3e} s"')
    for kind, factors in fitted.operators.items():
        lines += ["", f"[operators.{kind}]", f'overhead = "{factors.overhead:.3e} s"']
        lines += [f"compute = {factors.compute:.4g}", f"memory = {factors.memory:.4g}"]
    return "\n".join(lines) + "\n"


def show(models: Sequence[Mapping[str, Any]], exchanged: Sequence[Mapping[str, Any]]) -> None:
    for one in models:
        for part in (*PARTS, "step"):
            print(
                f"{one['model']:8}{part:9} measured {one['measured_ms'][part]:9.3f} ms, "
                + ", ".join(
                    f"{k} {one[f'{k}_ms'][part]:9.3f} ({_percent(one[f'{k}_error'][part])})"
                    for k in ("flat", "fitted")
                )
            )
        if "bytes_error" in one:
            print(f"{one['model']:8}bytes", {k: _percent(v) for k, v in one["bytes_error"].items()})
    for one in exchanged:
        print(one)


def _said(fit: Fit | OperatorFit) -> dict[str, Any]:
    curve = {k: float(f"{getattr(fit.curve, k):.5g}") for k in fit.curve.__dataclass_fields__}
    errors = {"mean_error": round(fit.mean_error, 4), "worst_error": round(fit.worst_error, 4)}
    return {**curve, **errors, "points": fit.points}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)


def _error(said: float, measured: float) -> float | None:
    return round(said / measured - 1, 4) if measured > 0 else None


def _percent(value: float | None) -> str:
    return "not measured" if value is None else f"{value:+.1%}"
