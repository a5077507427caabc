"""The plans that ``benchmarks.parallel.predicted_vs_measured`` runs: planner x order x links, each plan once."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nostall.core.errors import BadInput
from nostall.core.files import write_atomically
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
SLOW: tuple[tuple[str, Policy | None, str], ...] = (
    ("even", "1f1b", "p2p"),
    ("even", "gpipe", "p2p"),
    ("gpipe", "1f1b", "p2p"),
    ("gpipe", "pb", "p2p"),
    ("dapple", None, "p2p"),
    ("data-parallel", None, "p2p"),
    ("nostall", None, "p2p"),
)
WANTED: dict[tuple[str, str], tuple[tuple[str, Policy | None, str], ...]] = {
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
    ("gpt", "fast"): (
        ("even", "1f1b", "p2p"),
        ("even", "gpipe", "p2p"),
        ("gpipe", "1f1b", "p2p"),
        ("spp", None, "p2p"),
        ("data-parallel", None, "p2p"),
        ("nostall", None, "p2p"),
    ),
    ("chain", "slow"): SLOW,
    ("gpt", "slow"): SLOW,
}
"""Planner, order (None: the planner's own) and engine."""


@dataclass(frozen=True)
class Point:
    """One plan to run; ``plan`` is its file."""

    model: str
    links: str
    name: str
    engine: str
    plan: str
    split: str
    policy: str
    predicted_s: float


def name_of(planner: str, policy: Policy | None, engine: str) -> str:
    """What a point is called."""
    words = (planner, policy, "(torch)" if engine == "torch" else None)
    return " ".join(word for word in words if word)


def cluster_with(toml: str, slow_gbytes: float) -> str:
    """The cluster with slower links, for messages and collectives alike."""
    return re.sub(r"\b(bandwidth|allreduce)_gbytes = \S+", rf"\1_gbytes = {slow_gbytes}", toml)


def make_points(
    profiles: Mapping[str, Profile],
    clusters: Mapping[str, Cluster],
    folder: Path,
    done: Collection[tuple[str, str, str]] = (),
) -> list[Point]:
    """Plans, written to the folder; a plan that two planners find is run once, as the first's.

    What is ``done`` (model, links, name) is left out, and so are links without a cluster.
    """
    points: list[Point] = []
    for (model, links), every in WANTED.items():
        wanted = [w for w in every if (model, links, name_of(*w)) not in done]
        if links not in clusters or not wanted:
            continue
        profile = profiles[model]
        assert profile.batch is not None
        work = Workload(profile, clusters[links], MICRO_BATCHES * profile.batch)
        seen: dict[tuple[Any, ...], int] = {}
        for planner, policy, engine in wanted:
            name = name_of(planner, policy, engine)
            try:
                plan = make_plan(work, planner, Effort.for_workload(work, seconds=4))
            except BadInput as error:
                print(f"{model} {links} {name}: {error}")
                continue
            if policy:
                plan = replace(plan, policy=policy, in_flight=None)
            # In one stage all orders are one.
            key = (plan if len(plan.stages) > 1 else plan.stages, engine)
            if (known := seen.get(key)) is not None:
                points[known] = replace(points[known], name=f"{points[known].name} = {name}")
                continue
            seen[key] = len(points)
            path = folder / f"plan-{len(points)}.json"
            document = plan_document(evaluate_plan(work, plan, planner))
            write_atomically(path, json.dumps(document).encode())
            seconds = simulated_s(work, plan)
            points.append(
                Point(model, links, name, engine, str(path), plan.split, plan.policy, seconds)
            )
    return points
