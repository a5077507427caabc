"""Prices of today's model for the captured engines that ``peers_2.json`` measured.

    python -m benchmarks run parallel.repriced --out OUT.json

DDP, FSDP2 and tensor parallelism are priced by their rules' plans, optimiser included, beside the
measured medians and what the model of that day predicted.  No plan runs.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.result_file import load, results, save
from benchmarks.parallel.peers.run import CLUSTER, PREDICTED, SAMPLES, errors_of

ARM = "compiled and captured"
STATE_FACTOR = 4.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--measured", type=Path, default=results("parallel") / "peers_2.json")
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> None:
    os.environ.update(NOSTALL_PLANNED="1", NOSTALL_TINY="0")
    record = load(options.measured)
    rows = [row for model, own in record["models"].items() for row in _rows(model, own, record)]
    before = [{**row, "predicted_ms": row["then_ms"]} for row in rows if row["then_ms"]]
    save(
        options.out, kind="modelled", measured=options.measured.name,
        predictions=errors_of(rows, {}), then=errors_of(before, {}),
    )  # fmt: skip
    for row in rows:
        print(row)
    for name, own in (("now", errors_of(rows, {})), ("then", errors_of(before, {}))):
        print(name, own["mean_error"], own["worst_error"], own["tau_b_apart"])


def _rows(model: str, own: dict[str, Any], record: dict[str, Any]) -> list[dict[str, Any]]:
    from benchmarks.parallel.peers.models import MODELS
    from nostall.cli.planning.engines import RULES_OF
    from nostall.cli.planning.sharding import device_rates
    from nostall.parallel.cluster import parse_cluster
    from nostall.parallel.sharding.capture.operators import capture
    from nostall.parallel.sharding.cost.device_mesh import ClusterMesh
    from nostall.parallel.sharding.cost.prices import Prices
    from nostall.parallel.sharding.planners.rules import RULES
    from nostall.parallel.sharding.planners.sharding import Options, plan_by_rule
    from nostall.workload.hardware.file import load_hardware

    mesh = (record["gpus"],)
    measured = {a["arm"]: median(a["ms"]) for a in own["arms"] if a["mode"] == ARM and a.get("ms")}
    graph = capture(MODELS[model](), SAMPLES[model], mesh).graph
    cluster = parse_cluster(CLUSTER.format(gpus=record["gpus"]))
    prices = Prices(graph, ClusterMesh(cluster, mesh), device_rates(load_hardware("h200-measured")))
    rows = []
    for engine, rule in RULES_OF.items():
        if engine not in measured:
            continue
        plan = plan_by_rule(prices, RULES[rule], Options(state_factor=STATE_FACTOR))
        assert plan is not None
        then = own["candidates"].get(engine)
        rows.append({
            "model": model, "plan": engine, "predicted_ms": 1e3 * plan.whole_s,
            "measured_ms": measured[engine],
            "then_ms": 1e3 * sum(then[key] for key in PREDICTED) if then else None,
        })  # fmt: skip
    return rows
