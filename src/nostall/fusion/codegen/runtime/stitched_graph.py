"""Execution of a graph: stitched kernels for its patterns, eager PyTorch for other operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from nostall.fusion.codegen.cost.default_plan import default_plan
from nostall.fusion.codegen.emit.program import find_dynamic_size
from nostall.fusion.codegen.generate import PlanChooser, generate_partition
from nostall.fusion.codegen.runtime import eager
from nostall.fusion.codegen.runtime.kernel import BadTensor, StitchedKernel, load_kernel
from nostall.fusion.graph.dynamic_size import Size, resized, varies
from nostall.fusion.graph.graph import MAX_ELEMENTS, Graph


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
        self, *inputs: Tensor, size: Size | None = None, device: torch.device | None = None
    ) -> tuple[Tensor, ...]:
        """Run the graph and return its outputs, which may be views of each other.

        ``size``: the current dynamic sizes; required if the graph has any and the shapes of the
        inputs do not show them. ``device``: where a graph without inputs runs; by default on the
        GPU.
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

    def _can_run_kernels(self, size: Size | None) -> bool:
        """Whether tensors of these dynamic sizes have elements, few enough for int32 indices."""
        varying = self.graph.varying
        if size is None or varying is None:
            return True
        sizes = size if isinstance(size, tuple) else (size,)
        most = max((resized(n, varying, size) for n in self._element_counts), default=0)
        return all(sizes) and most <= MAX_ELEMENTS

    @cached_property
    def _has_dynamic_size(self) -> bool:
        varying = self.graph.varying
        return any(varies(size, varying) for node in self.graph for size in node.shape)

    @cached_property
    def _element_counts(self) -> frozenset[int]:
        return frozenset(count for node in self.graph for count in node.counts)


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
    steps, illegal_reasons = generate_partition(
        graph, patterns, choice, lambda program: load_kernel(program, folder)
    )
    return StitchedGraph(graph, steps, illegal_reasons)
