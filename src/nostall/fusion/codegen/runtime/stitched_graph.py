"""Execution of a graph: stitched kernels for its patterns, eager PyTorch for other operators."""

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
    """A greedy partition of operators (by default all) into kernels, grown along producers.

    It is a baseline for tests and for graphs without an explored partition.  An operator joins the
    kernels of all its producers, of one of them, or none.  Operators without a kernel stay alone.
    """
    groups: list[set[int]] = []
    for index in graph.operators if operators is None else sorted(operators):
        producers = [group for group in groups if group & set(graph.sources[index])]
        all_merged = {index}.union(*producers)
        for merged in (all_merged, *({index} | group for group in reversed(producers)), {index}):
            rest = [group for group in groups if not group & merged]
            if len(merged) == 1 or (
                no_kernel_reason(graph, merged) is None and graph.is_acyclic([*rest, merged])
            ):
                groups = [*rest, merged]
                break
    return [tuple(sorted(group)) for group in groups]


def supported_groups(graph: Graph, groups: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The same patterns, with those that code generation does not support split."""
    return [
        subgroup
        for group in groups
        for subgroup in (
            [group] if no_kernel_reason(graph, group) is None else grow_partition(graph, group)
        )
    ]


@dataclass(frozen=True)
class StitchedGraph:
    """A graph as a function of its inputs."""

    graph: Graph = field(repr=False)
    steps: tuple[StitchedKernel | int, ...]  # in execution order: kernels, and operators (nodes)
    illegal_reasons: Counter[str]  # number of patterns without a kernel, by reason

    @property
    def kernels(self) -> int:
        """The number of stitched kernels; all other operators run in PyTorch."""
        return sum(not isinstance(step, int) for step in self.steps)

    def __call__(
        self, *inputs: Tensor, size: int | None = None, device: torch.device | None = None
    ) -> tuple[Tensor, ...]:
        """Run the graph and return its outputs, which may be views of each other.

        ``size``: the current dynamic size; required if the graph has one and no input has it in
        its shape. ``device``: where a graph without inputs runs; by default on the GPU.
        """
        graph = self.graph
        if size is None:
            size = find_dynamic_size(graph, graph.inputs, inputs)
        if size is None and self._has_dynamic_size:
            raise BadTensor(
                "no input has the dynamic size in its shape; pass size= or a tensor that has it"
            )
        device = inputs[0].device if inputs else device or torch.device("cuda")
        values: dict[int, Tensor] = dict(zip(graph.inputs, inputs, strict=True))

        def value(index: int) -> Tensor:
            tensor: Tensor = eager.read_value(graph, index, values, size, device)
            return tensor

        for step in self.steps if self._can_run_kernels(size) else graph.operators:
            if not isinstance(step, int):
                arguments = [values[index] for index in step.program.inputs]
                values.update(
                    zip(
                        step.program.outputs,
                        step(*arguments, size=size, device=device),
                        strict=True,
                    )
                )
            else:
                node = graph[step].resized(graph.varying, size)
                values[step] = eager.run_operator(node, [value(index) for index in node.inputs])
        return tuple(value(index) for index in graph.outputs)

    def _can_run_kernels(self, size: int | None) -> bool:
        """Whether tensors of this dynamic size have elements, and few enough for int32 indices."""
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
    """Generate and load a kernel for each pattern of a partition.

    ``patterns``: the partition (default: :func:`grow_partition`); other operators stay alone.
    ``choice``: chooses the plan of each kernel.  ``folder``: where sources are written (default:
    the store).

    A pattern without a kernel is partitioned into smaller ones; what still has no kernel runs in
    PyTorch, operator by operator, and its reason is counted.  Raises :class:`BadFusion` if the
    graph has opaque nodes or the patterns depend on each other in a cycle.
    """
    if opaque := [node for node in graph if node.kind == "opaque"]:
        raise BadFusion(
            f"{opaque[0]} is opaque; stitch the regions between opaque nodes one by one"
        )
    groups = [
        tuple(sorted(group)) for group in (grow_partition(graph) if patterns is None else patterns)
    ]
    covered = {index for group in groups for index in group}
    groups += [(index,) for index in graph.operators if index not in covered]
    groups = supported_groups(graph, groups)
    order = graph.execution_order(groups)
    if order is None:
        raise BadFusion(
            "the patterns depend on each other in a cycle; give a partition whose contraction is "
            "acyclic"
        )
    steps: list[StitchedKernel | int] = []
    illegal_reasons: Counter[str] = Counter()
    for at in order:
        try:
            steps.append(load_kernel(generate(graph, groups[at], choice), folder))
        except BadInput as error:
            illegal_reasons[str(error)] += 1
            steps.extend(groups[at])
    return StitchedGraph(graph, tuple(steps), illegal_reasons)
