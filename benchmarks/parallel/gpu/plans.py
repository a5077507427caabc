"""Plans of ``benchmarks.parallel.predicted_vs_measured``: planners, orders and kinds of links."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nostall.core.errors import BadInput
from nostall.core.files.atomic import write_atomically
from nostall.parallel.cluster import Cluster
from nostall.parallel.evaluation import evaluate_plan
from nostall.parallel.plan import Policy, Workload
from nostall.parallel.plan_file import plan_document
from nostall.parallel.planners import Effort, make_plan
from nostall.parallel.profile import Profile
from nostall.parallel.simulate import simulated_s

MICRO_BATCHES = 8
BASELINE = "even 1f1b"
CHOSEN = "nostall"
SLOW_LINK_POINTS: tuple[tuple[str, Policy | None, str], ...] = (
    ("even", "1f1b", "p2p"),
    ("even", "gpipe", "p2p"),
    ("gpipe", "1f1b", "p2p"),
    ("gpipe", "pb", "p2p"),
    ("dapple", None, "p2p"),
    ("data-parallel", None, "p2p"),
    ("nostall", None, "p2p"),
)
PLANNED_POINTS: dict[tuple[str, str], tuple[tuple[str, Policy | None, str], ...]] = {
    ("gpt", "fast"): (
        ("even", "1f1b", "p2p"),
        ("even", "gpipe", "p2p"),
        ("gpipe", "1f1b", "p2p"),
        ("spp", None, "p2p"),
        ("data-parallel", None, "p2p"),
        ("nostall", None, "p2p"),
    ),
    ("gpt", "slow"): SLOW_LINK_POINTS,
    ("chain", "slow"): SLOW_LINK_POINTS,
    ("chain", "fast"): (
        ("even", "1f1b", "p2p"),
        ("even", "1f1b", "torch"),
        ("even", "gpipe", "p2p"),
        ("even", "zero-bubble", "p2p"),
        ("gpipe", "1f1b", "p2p"),
        ("gpipe", "zero-bubble", "p2p"),
        ("dapple", None, "p2p"),
        ("spp", None, "p2p"),
        ("pipedream", None, "p2p"),
        ("data-parallel", None, "p2p"),
        ("nostall", None, "p2p"),
    ),
}
"""(planner, order, engine) by model and links; order None: that of the planner."""


@dataclass(frozen=True)
class Point:
    """One plan to run."""

    model: str
    links: str
    """``fast`` or ``slow`` (emulated)."""
    name: str
    engine: str
    plan: str
    """Path of the plan file."""
    split: str
    policy: str
    predicted_s: float


def point_name(planner: str, policy: Policy | None, engine: str) -> str:
    """Name of a point, for example ``even 1f1b (torch)``."""
    words = (planner, policy, "(torch)" if engine == "torch" else None)
    return " ".join(word for word in words if word)


def slow_cluster(toml: str, slow_gbytes: float) -> str:
    """The cluster file with the bandwidth of messages and collectives set to ``slow_gbytes``."""
    return re.sub(r"\b(bandwidth|allreduce)_gbytes = \S+", rf"\1_gbytes = {slow_gbytes}", toml)


def make_points(
    profiles: Mapping[str, Profile],
    clusters: Mapping[str, Cluster],
    folder: Path,
    done: Collection[tuple[str, str, str]] = (),
) -> list[Point]:
    """Make the plans and write them to ``folder``; equal plans of several planners are one point.

    Points in ``done`` (model, links, name) are omitted, and so are links without a cluster.
    """
    points: list[Point] = []
    for (model, links), all_settings in PLANNED_POINTS.items():
        settings = [s for s in all_settings if (model, links, point_name(*s)) not in done]
        if links not in clusters or not settings:
            continue
        profile = profiles[model]
        assert profile.batch is not None
        work = Workload(profile, clusters[links], MICRO_BATCHES * profile.batch)
        index_of_plan: dict[tuple[Any, ...], int] = {}
        for planner, policy, engine in settings:
            name = point_name(planner, policy, engine)
            try:
                plan = make_plan(work, planner, Effort.for_workload(work, seconds=4))
            except BadInput as error:
                print(f"{model} {links} {name}: {error}")
                continue
            if policy:
                plan = replace(plan, policy=policy, in_flight=None)
            # The order does not matter in a plan of one stage.
            key = (plan if len(plan.stages) > 1 else plan.stages, engine)
            if (index := index_of_plan.get(key)) is not None:
                points[index] = replace(points[index], name=f"{points[index].name} = {name}")
                continue
            index_of_plan[key] = len(points)
            path = folder / f"plan-{len(points)}.json"
            document = plan_document(evaluate_plan(work, plan, planner))
            write_atomically(path, json.dumps(document).encode())
            seconds = simulated_s(work, plan)
            points.append(
                Point(model, links, name, engine, str(path), plan.split, plan.policy, seconds)
            )
    return points
