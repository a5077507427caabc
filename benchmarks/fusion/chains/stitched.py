"""A chain's operators and its stitched kernels: chosen by a race, or those of a result."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from benchmarks.fusion.chains.programs import Chain
from benchmarks.fusion.chains.timing import Inputs, Method, quickly
from nostall.core.errors import BadInput
from nostall.fusion.capture import capture, inference_graph
from nostall.fusion.capture.randomness import SEEDS, replace_random_ops, seeds
from nostall.fusion.capture.slicing import hoist_slices
from nostall.fusion.codegen.autotune.autotuner import Autotuner
from nostall.fusion.codegen.cost.default_plan import default_plan
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph, grow_partition, stitch
from nostall.fusion.codegen.tiling.plan_variants import plans_with_variants
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.explore.default_partition import default_partition
from nostall.fusion.graph.graph import Graph
from nostall.gpu.clock import ReplayClock

Partition = list[tuple[int, ...]]


class _Module(nn.Module):
    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self.chain = chain

    def forward(self, *inputs: Tensor) -> Any:
        return self.chain.function(*inputs)


def graph_of(chain: Chain, device: str = "cpu") -> Graph:
    """The chain's operators, traced with fake tensors; raises :class:`BadInput` where some of them
    are not captured.

    A chain with random numbers has one more input, the last one: their seeds.
    """
    with FakeTensorMode():
        inputs = chain.tensors(device)
    module = hoist_slices(replace_random_ops(inference_graph(_Module(chain), *inputs)))
    captured = capture(module)
    if captured.report.unsupported:
        raise BadInput(f"{chain.name}: {captured.report}; write the chain without these")
    drawn = [captured.values[node] for node in module.graph.nodes if node.target is SEEDS]
    assert list(captured.graph.inputs[len(inputs) :]) == drawn
    return captured.graph


def partitions(graph: Graph) -> dict[str, Partition]:
    """The explorer's and the greedy one; one of them where they are equal."""
    found = {"explorer": default_partition(graph), "greedy": grow_partition(graph)}
    if sorted(found["explorer"]) == sorted(found["greedy"]):
        del found["greedy"]
    return found


def least_bytes(graph: Graph) -> int:
    """Bytes that have to be read and written once: inputs and outputs."""
    return sum(graph[i].bytes for i in {*graph.inputs, *graph.outputs})


def method(whole: StitchedGraph, given: int) -> Method:
    """``given`` inputs are the chain's; seeds are drawn anew in every run, as PyTorch does."""
    more = [whole.graph[index].elements for index in whole.graph.inputs[given:]]

    def run(inputs: Inputs) -> tuple[Tensor, ...]:
        return whole(*inputs, *(seeds(count, inputs[0].device) for count in more))

    return Method(run)


def raced(
    chain: Chain, sets: Sequence[Inputs], most: int, folder: Path
) -> tuple[Method, dict[str, Any]]:
    """The chain as kernels, of the faster partition, and how they were chosen."""
    graph = graph_of(chain)
    found: list[tuple[float, str, StitchedGraph, Method]] = []
    races: dict[str, Any] = {}
    for name, groups in partitions(graph).items():
        racer = Autotuner(ReplayClock(), most, folder=folder)
        whole = stitch(graph, groups, choice=racer if most else default_plan, folder=folder)
        one = method(whole, len(chain.inputs))
        seconds = quickly(one.run, sets)
        found.append((seconds, name, whole, one))
        told = [
            record.model_dump(exclude={"schema_version"}, by_alias=True) for record in racer.records
        ]
        races[name] = {"us": seconds, "kernels": told, "refused": dict(whole.illegal_reasons)}
    _, name, whole, best = min(found, key=lambda entry: entry[0])
    return best, {"partition": name, "plans": plans_of(whole), "race": races}


def plans_of(whole: StitchedGraph) -> list[str]:
    return [str(step.program.plan) for step in whole.steps if not isinstance(step, int)]


# -- as a result has it ----------------------------------------------------------------------------


def taken(chain: Chain, how: dict[str, Any], folder: Path) -> StitchedGraph:
    """The kernels that the result ``how`` has, without a race.

    Raises :class:`BadInput` where today's planner does not make them any more.
    """
    graph = graph_of(chain)
    groups = partitions(graph).get(how["partition"]) or partitions(graph)["explorer"]
    choices = as_told(how["plans"])
    whole = stitch(graph, groups, choice=partial(_next, choices), folder=folder)
    if plans_of(whole) != how["plans"]:
        raise BadInput(
            f"{chain.name}: the result has {how['plans']}, today it is {plans_of(whole)}; "
            "measure the chain again"
        )
    return whole


def as_told(told: Sequence[str]) -> list[str]:
    """The plans that a choice is asked for, of those of all kernels; packs choose by themselves."""
    return [plan for plan in reversed(told) if not re.match(r"packed \(", plan)]


def _next(left: list[str], of: Schedule) -> PlannedKernel:
    """The plan that is next in ``left``, from its end, where the schedule has it."""
    for kernel in plans_with_variants(of):
        if left and str(kernel) == left[-1]:
            left.pop()
            return kernel
    return default_plan(of)
