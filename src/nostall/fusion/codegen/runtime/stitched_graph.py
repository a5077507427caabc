"""A whole graph as stitched kernels: one for each of its patterns, PyTorch for what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from nostall.core.errors import BadInput
from nostall.fusion.codegen.cost.default_plan import default_plan
from nostall.fusion.codegen.emit.program import find_dynamic_size
from nostall.fusion.codegen.generate import (
    PlanChooser,
    generate,
    no_kernel_reason,
    schedule_operators,
)
from nostall.fusion.codegen.runtime import eager
from nostall.fusion.codegen.runtime.kernel import BadTensor, StitchedKernel, load_kernel
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.dynamic_size import varies
from nostall.fusion.graph.graph import MAX_ELEMENTS, Graph

__all__ = ["PlanChooser", "StitchedGraph", "grow_partition", "schedule_operators", "stitch"]


def grow_partition(graph: Graph, operators: Iterable[int] | None = None) -> list[tuple[int, ...]]:
    """A partition of operators (all, if none are said) into kernels, grown along producers.

    Not a plan to be proud of: it is for graphs that nobody explored, and for tests.  Operators for
    which there is no kernel stand alone.
    """
    groups: list[set[int]] = []
    for index in graph.operators if operators is None else sorted(operators):
        near = [group for group in groups if group & set(graph.sources[index])]
        everything = {index}.union(*near)
        for union in (everything, *({index} | group for group in reversed(near)), {index}):
            rest = [group for group in groups if not group & union]
            if len(union) == 1 or (
                no_kernel_reason(graph, union) is None and graph.is_acyclic([*rest, union])
            ):
                groups = [*rest, union]
                break
    return [tuple(sorted(group)) for group in groups]


@dataclass(frozen=True)
class StitchedGraph:
    """A graph as a function of its inputs.  ``no_kernel_reason`` counts why operators are not stitched."""

    graph: Graph = field(repr=False)
    steps: tuple[StitchedKernel | int, ...]
    illegal_reasons: Counter[str]

    @property
    def kernels(self) -> int:
        """Stitched patterns; the operators beside them run in PyTorch."""
        return sum(not isinstance(step, int) for step in self.steps)

    def __call__(self, *inputs: Tensor, size: int | None = None) -> tuple[Tensor, ...]:
        """The outputs; they may be views of each other where the graph's are.

        ``size`` is what varies, where something does and no input shows it.
        """
        graph = self.graph
        if size is None:
            size = find_dynamic_size(graph, graph.inputs, inputs)
        if size is None and self._has_dynamic_size:
            raise BadTensor(
                "no input shows the size that varies; it takes a tensor that has it, or size="
            )
        device = inputs[0].device if inputs else torch.device("cuda")
        values: dict[int, Tensor] = dict(zip(graph.inputs, inputs, strict=True))

        def value(index: int) -> Tensor:
            found: Tensor = eager.read_value(graph, index, values, size, device)
            return found

        for step in self.steps if self._can_run_kernels(size) else graph.operators:
            if not isinstance(step, int):
                given = [values[index] for index in step.program.inputs]
                values.update(zip(step.program.outputs, step(*given, size=size), strict=True))
            else:
                node = graph[step].resized(graph.varying, size)
                values[step] = eager.run_operator(node, [value(index) for index in node.inputs])
        return tuple(value(index) for index in graph.outputs)

    def _can_run_kernels(self, size: int | None) -> bool:
        """Whether kernels have something to do and can count every tensor's elements."""
        if size is None or self.graph.varying is None:
            return True
        return 0 < size * self._max_elements <= MAX_ELEMENTS * self.graph.varying

    @cached_property
    def _has_dynamic_size(self) -> bool:
        varying = self.graph.varying
        return any(varies(size, varying) for node in self.graph for size in node.shape)

    @cached_property
    def _max_elements(self) -> int:
        return max((node.elements for node in self.graph), default=0)


def stitch(
    graph: Graph,
    patterns: Sequence[Iterable[int]] | None = None,
    *,
    choice: PlanChooser = default_plan,
    folder: Path | None = None,
) -> StitchedGraph:
    """Kernels for the patterns of a plan (:func:`grow_partition` where none is given).

    What cannot be one kernel runs in PyTorch, operator by operator, and is counted with its reason.
    Raises :class:`BadFusion` for a graph with opaque nodes and for patterns that wait for each
    other.
    """
    if opaque := [node for node in graph if node.kind == "opaque"]:
        raise BadFusion(f"{opaque[0]} is opaque; give the regions between such nodes one by one")
    groups = [
        tuple(sorted(group)) for group in (grow_partition(graph) if patterns is None else patterns)
    ]
    held = {index for group in groups for index in group}
    groups += [(index,) for index in graph.operators if index not in held]
    # A plan may be made of more than code generation can do; then smaller kernels do.
    groups = [
        part
        for group in groups
        for part in (
            [group] if no_kernel_reason(graph, group) is None else grow_partition(graph, group)
        )
    ]
    order = graph.execution_order(groups)
    if order is None:
        raise BadFusion(
            "the patterns wait for each other; give a plan whose contraction is acyclic"
        )
    steps: list[StitchedKernel | int] = []
    left: Counter[str] = Counter()
    for at in order:
        try:
            steps.append(load_kernel(generate(graph, groups[at], choice), folder))
        except BadInput as error:
            left[str(error)] += 1
            steps.extend(groups[at])
    return StitchedGraph(graph, tuple(steps), left)
