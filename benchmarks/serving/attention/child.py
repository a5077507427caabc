"""Child process of the attention benchmark: measures one batch, and writes results as they come."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.serving.attention.batches import KINDS, batch, bound
from benchmarks.serving.attention.cuda_graphs import GraphedCalls, interleaved_us
from benchmarks.serving.attention.inputs import HAS_GPU, make_inputs
from benchmarks.serving.attention.kernels import KERNELS
from benchmarks.serving.attention.peers import PEERS
from benchmarks.serving.attention.plans import (
    NARROW,
    PAPER,
    WIDE,
    applicable,
    candidates,
    on_two_streams,
    one_after_the_other,
    ours,
    settings,
)
from nostall.core.files.atomic import write_atomically
from nostall.serving.attention.config import AttentionPlan, AttentionShape
from nostall.serving.attention.gluon_launch import has_gluon_kernel
from nostall.serving.attention.launch import PagedCache
from nostall.serving.attention.rules import GLUON_PLANS, PLANS, BatchKind
from nostall.serving.attention.space import plan_fields, plan_of
from nostall.serving.attention.winners.on_gpu import TOLERANCE, GpuBatch
from nostall.serving.batch.examples import make_batch

Call = Callable[[PagedCache], Tensor]
GLUON_SHARES = (0.8, 0.9)
"""Parts of the SMs that prefills get in the Gluon kernel while decodes run beside it."""
CHUNK = 8
"""Plans that are measured in one interleaved series."""


class Case:
    """One batch on the GPU: checks calls, captures them, and keeps a result that can be written."""

    def __init__(self, name: str, heads: tuple[int, int], out: Path, deadline: float) -> None:
        self.out, self.deadline = out, deadline
        self.outs: dict[str, Tensor] = {}
        ragged = batch(name)
        has_trees = any(mask is not None for mask in ragged.tree_masks)
        shape = AttentionShape(*heads, has_trees=has_trees)
        self.inputs: GpuBatch = make_inputs(ragged, shape)
        self.gpu = torch.cuda.get_device_name() if HAS_GPU else "none"
        self.result: dict[str, Any] = {
            "batch": name,
            "kind": KINDS[name],
            "heads": list(heads),
            "gpu": self.gpu,
            "bound": bound(ragged, *heads, shape.head_dim, self.gpu)._asdict(),
            "entries": [],
            "failures": {},
        }

    def capture(self, name: str, make: Callable[[], Call]) -> GraphedCalls | None:
        """The graph of a call whose result is right; None, and a failure noted, otherwise."""
        try:
            call = make()
            out = call(self.inputs.caches[0])
            out.fill_(float("nan"))
            out = call(self.inputs.caches[0])
            if HAS_GPU:
                torch.cuda.synchronize()
            error = self.inputs.error(out)
            if not error < TOLERANCE and not self.is_other_problem(name):
                self.fail(name, f"wrong result: relative error {error:.3g}")
                return None
            self.result.setdefault("errors", {})[name] = error
            # The last call is with the cache whose result is known, for the check after the timing.
            caches = [*self.inputs.caches[1:], self.inputs.caches[0]]
            calls = [lambda cache=cache: call(cache) for cache in caches]
            self.outs[name] = out
            return GraphedCalls(calls * max(1, 4 // len(calls)))
        except Exception as error:  # a kernel that cannot run here is a result, not the end
            self.fail(name, f"{type(error).__name__}: {str(error)[:300]}")
            if "illegal" in str(error).lower() or "launch failure" in str(error).lower():
                raise
            return None

    def time(
        self, graphs: dict[str, GraphedCalls], rounds: int, seconds: float, final: bool
    ) -> dict[str, list[float]]:
        """Microseconds of each graph; those whose result is wrong after the timing are left out."""
        samples = interleaved_us(graphs, rounds, seconds)
        for name, graph in graphs.items():
            self.outs[name].fill_(float("nan"))
            graph.replay()
            if HAS_GPU:
                torch.cuda.synchronize()
            error = self.inputs.error(self.outs[name])
            if name != "SDPA" and not error < TOLERANCE and not self.is_other_problem(name):
                self.fail(name, f"wrong result in a CUDA graph: relative error {error:.3g}")
                del samples[name]
        self.result["entries"].append({"final": final, "samples_us": samples})
        self.save()
        return samples

    def is_other_problem(self, name: str) -> bool:
        """Whether a peer ignores the batch's trees: its time is that of the causal batch."""
        return name in PEERS and self.inputs.shape.has_trees

    def fail(self, name: str, reason: str) -> None:
        self.result["failures"][name] = reason
        self.save()

    def save(self) -> None:
        write_atomically(self.out, json.dumps(self.result).encode())

    def is_late(self, seconds: float = 0.0) -> bool:
        return time.monotonic() > self.deadline - seconds


def sweep(case: Case, peers: Path) -> None:
    """Find a fast plan: all kernels with one setting, then variations of the best kernels."""
    fa3 = case.capture("FA3", lambda: PEERS["FA3"](case.inputs, peers))
    anchor = {"FA3": fa3} if fa3 else {}
    is_mixed = len(set(case.inputs.ragged.stages.tolist())) > 1
    first = {name: AttentionPlan(KERNELS[name]) for name in applicable(case.inputs)}
    measured = _measure(case, anchor, first, rounds=7)
    best = sorted(measured, key=measured.__getitem__)[:3]
    more = {
        f"{name} | {_label(plan)}": plan
        for name in best
        for plan in settings(AttentionPlan(KERNELS[name]), is_mixed)
    }
    measured |= _measure(case, anchor, more, rounds=7)
    plans = first | more
    finalists = sorted(measured, key=measured.__getitem__)[:4]
    case.result["finalists"] = {
        name: {"plan": plan_fields(plans[name]), "median_us": measured[name]} for name in finalists
    }
    _measure(case, anchor, {name: plans[name] for name in finalists}, rounds=25, final=True)


def _label(plan: AttentionPlan) -> str:
    return (
        f"{plan.order} {plan.kernel.schedule} units={plan.units_per_program} "
        f"least={plan.least_split} front={plan.kernel.front_share}"
    )


def _measure(
    case: Case,
    anchor: dict[str, GraphedCalls],
    plans: dict[str, AttentionPlan],
    rounds: int,
    final: bool = False,
) -> dict[str, float]:
    """Median microseconds of plans; entries are added to the result chunk by chunk."""
    medians: dict[str, float] = {}
    names = list(plans)
    for start in range(0, len(names), CHUNK):
        if case.is_late(3.0):
            case.fail("time", f"stopped before {names[start]}")
            break
        graphs = dict(anchor)
        for name in names[start : start + CHUNK]:
            out = torch.empty_like(case.inputs.query)
            plan = plans[name]
            graph = case.capture(name, lambda plan=plan, out=out: ours(plan, case.inputs, out))
            if graph:
                graphs[name] = graph
        if final and len(graphs) > len(anchor):
            # A second capture of the fastest plan: the null.
            out = torch.empty_like(case.inputs.query)
            best = plans[names[start]]
            graph = case.capture("null", lambda best=best, out=out: ours(best, case.inputs, out))
            if graph:
                graphs["null"] = graph
        if len(graphs) == len(anchor):
            continue
        samples = case.time(graphs, rounds, 3.0 if final else 1.0, final)
        medians |= {
            name: statistics.median(values)
            for name, values in samples.items()
            if name not in anchor and name != "null"
        }
    return medians


def compare(case: Case, peers: Path, group: list[str], plan: AttentionPlan) -> None:
    """Measure a plan, its null and a group of peers in one interleaved series."""
    inputs = case.inputs

    def fresh() -> Tensor:
        return torch.empty_like(inputs.query)

    makers: dict[str, Callable[[], Call]] = {
        "ours": lambda: ours(plan, inputs, fresh()),
        "null": lambda: ours(plan, inputs, fresh()),
        "paper": lambda: ours(PAPER, inputs, fresh()),
        "stages": lambda: one_after_the_other(plan, inputs, fresh()),
        "streams": lambda: on_two_streams(
            AttentionPlan(WIDE, units_per_program=1), AttentionPlan(NARROW), inputs, fresh()
        ),
        **{
            f"tall {share}": (
                lambda share=share: on_two_streams(
                    GLUON_PLANS["prefill"], PLANS["decode"], inputs, fresh(), share
                )
            )
            for share in GLUON_SHARES
        },
        **{name: (lambda make=make: make(inputs, peers)) for name, make in PEERS.items()},
    }
    graphs = {}
    stages = set(inputs.ragged.stages.tolist())
    overlaps = stages == {0, 1} and has_gluon_kernel(inputs.query.device)
    beside = [f"tall {share}" for share in GLUON_SHARES] if overlaps else []
    for name in ["ours", "null", *group, *beside]:
        graph = case.capture(name, makers[name])
        if graph:
            graphs[name] = graph
    if graphs:
        case.time(graphs, 40, 2.0, final=True)
    case.result["plan"] = plan_fields(plan)
    case.save()


def best_of_candidates(case: Case, peers: Path) -> AttentionPlan:
    """The fastest of the plans for the batch's kind, by one interleaved series with FA3."""
    inputs = case.inputs
    lengths = inputs.ragged.query_lengths
    speculative = inputs.ragged.stages == 2
    longest = 1 if lengths.max() == 1 else int(lengths.max())
    limit = longest if speculative.any() else 1
    kind = BatchKind(bool((lengths == 1).any()), longest, limit).kind(inputs.shape.group)
    plans = candidates(kind)
    graphs = {}
    fa3 = case.capture("FA3", lambda: PEERS["FA3"](inputs, peers))
    if fa3:
        graphs["FA3"] = fa3
    for name, plan in plans.items():
        out = torch.empty_like(inputs.query)
        graph = case.capture(name, lambda plan=plan, out=out: ours(plan, inputs, out))
        if graph:
            graphs[name] = graph
    samples = case.time(graphs, 20, 2.0, final=False)
    medians = {name: statistics.median(values) for name, values in samples.items() if name != "FA3"}
    best = min(medians, key=medians.__getitem__, default="rule")
    case.result |= {"plan_kind": kind, "best": best}
    return plans[best]


def compile_share(
    share: int, shares: int, heads: tuple[int, int], with_trees: bool, with_all: bool
) -> None:
    """Fill Triton's cache with every ``shares``-th kernel, by launches on a small batch."""
    for has_trees in (False, True) if with_trees else (False,):
        shape = AttentionShape(*heads, has_trees=has_trees)
        ragged = make_batch([1, 40], [700, 700])
        inputs = make_inputs(ragged, shape)
        out = torch.empty_like(inputs.query)
        schedules = ("queue", "ranges", "unit")
        kernels = KERNELS if with_all else {}
        jobs = [(kernel, schedule) for kernel in kernels.values() for schedule in schedules]
        ruled = [plan.kernel for kind in PLANS for plan in candidates(kind).values()]
        ruled += [PAPER.kernel, WIDE, NARROW]
        jobs += list(dict.fromkeys((kernel, kernel.schedule) for kernel in ruled))
        for kernel, schedule in jobs[share::shares]:
            if has_trees and (schedule != "queue" or kernel.language == "gluon"):
                continue
            order = "sorted" if schedule == "unit" else "paired"
            plan = AttentionPlan(
                replace(kernel, schedule=schedule, programs_per_sm=1),
                order=order,
                split=256,
                least_split=256,
            )
            try:
                ours(plan, inputs, out)(inputs.caches[0])
                if HAS_GPU:
                    torch.cuda.synchronize()
            except Exception as error:  # the sweep reports it
                print(f"compile {kernel}: {type(error).__name__} {str(error)[:200]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("compile", "sweep", "compare", "rules"), required=True)
    parser.add_argument("--batch", default="mixed")
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8))
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1))
    parser.add_argument("--trees", action="store_true", help="compile kernels with trees too")
    parser.add_argument("--all", action="store_true", help="compile the kernels of the sweep too")
    parser.add_argument("--group", default="FA3")
    parser.add_argument("--plan", type=Path, help="JSON of a plan")
    parser.add_argument("--peers", type=Path, default=Path("peers"))
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    heads = (options.heads[0], options.heads[1])
    np.seterr(all="ignore")
    if options.mode == "compile":
        compile_share(*options.share, heads, options.trees, options.all)
        return
    if options.mode == "rules":
        for name in options.batch.split(","):
            if time.monotonic() > deadline - 8:
                print(f"out of time before {name}", flush=True)
                break
            case = Case(name, heads, options.out.with_suffix(f".{name}"), deadline)
            plan = best_of_candidates(case, options.peers)
            compare(case, options.peers, options.group.split(","), plan)
            print(f"{name}: done, {deadline - time.monotonic():.0f} s left", flush=True)
            del case
            if HAS_GPU:
                torch.cuda.empty_cache()
        return
    case = Case(options.batch, heads, options.out, deadline)
    if options.mode == "sweep":
        sweep(case, options.peers)
    else:
        plan = plan_of(json.loads(options.plan.read_text())) if options.plan else AttentionPlan()
        compare(case, options.peers, options.group.split(","), plan)


if __name__ == "__main__":
    main()
