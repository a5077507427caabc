"""Compilation of a PyTorch function with generated kernels for its memory-intensive regions.

``torch.compile`` traces the function and guards the result. Each graph is captured, each region
between opaque operators becomes generated kernels, and PyTorch runs the opaque operators. Nothing
here checks whether the result is faster; the ``nostall`` backend of ``torch.compile`` does.

Steps of a stitched module: their order, and which of its results need memory of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.fx.node import map_arg

from nostall.fusion.capture import CapturedGraph, capture
from nostall.fusion.capture.memory import draws_random_numbers, mutated_tensors, shared_memory
from nostall.fusion.capture.randomness import SEEDS, replace_random_ops
from nostall.fusion.capture.slicing import hoist_slices
from nostall.fusion.capture.trace import decompositions
from nostall.fusion.codegen.cost.default_plan import default_plan
from nostall.fusion.codegen.generate import PlanChooser
from nostall.fusion.codegen.runtime import eager
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph, stitch
from nostall.fusion.graph.dynamic_size import Size, SizeReader, part_of_size
from nostall.fusion.graph.graph import Graph
from nostall.fusion.recompute.copies import Kernels
from nostall.fusion.recompute.kernels import default_kernels
from nostall.fusion.region_plans import captured_regions


@dataclass(frozen=True)
class Step:
    """One step of a run: the kernels of a region, or a call that PyTorch runs.

    Values are identified by their nodes in the captured graph.  Inputs may be views.
    """

    action: StitchedGraph | FxNode
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    last_uses: tuple[int, ...] = ()
    """Values that no later step reads; they are released after this step."""


def order_steps(
    steps: list[Step], results: set[int], nodes: Iterable[FxNode], graph: Graph
) -> list[Step]:
    """Sort steps topologically and set the last uses of each; ``results`` are never released.

    A step that reads a view of ``graph`` uses the viewed value.

    Calls that touch memory which one of them changes keep the order that they have in ``nodes``.
    So do calls that draw random numbers, unless a region would have to run before and after one.
    """
    producer = {index: at for at, step in enumerate(steps) for index in step.outputs}
    predecessors = {
        at: {producer[i] for i in map(graph.base, step.inputs) if i in producer}
        for at, step in enumerate(steps)
    }
    place = {step.action: at for at, step in enumerate(steps) if isinstance(step.action, FxNode)}
    for before, after in _changes_in_order(list(nodes)):
        if before in place and after in place:
            predecessors[place[after]].add(place[before])
    random = [at for at, step in enumerate(steps) if _is_random(step.action)]
    in_order = {at: set(before) for at, before in predecessors.items()}
    for before_at, at in pairwise(random):
        in_order[at].add(before_at)
    try:
        order = list(TopologicalSorter(in_order).static_order())
    except CycleError:
        order = list(TopologicalSorter(predecessors).static_order())
    return _with_last_uses([steps[at] for at in order], results, graph)


def _with_last_uses(ordered: Sequence[Step], results: set[int], graph: Graph) -> list[Step]:
    used_later = set(results)
    reversed_steps = []
    for step in reversed(ordered):
        # A result that no step reads is released by the step that computes it.
        last_uses = {*map(graph.base, step.inputs), *step.outputs} - used_later
        used_later |= last_uses
        reversed_steps.append(replace(step, last_uses=tuple(sorted(last_uses))))
    return reversed_steps[::-1]


def _changes_in_order(nodes: list[FxNode]) -> Iterator[tuple[FxNode, FxNode]]:
    """Pairs of calls (one, the next) that touch a memory which some call changes."""
    memory, mutated = shared_memory(nodes), mutated_tensors(nodes)
    last: dict[FxNode, FxNode] = {}
    for node in nodes:
        if node.op == "call_function":
            for touched in {memory[n] for n in (node, *node.all_input_nodes) if n in mutated}:
                if touched in last:
                    yield last[touched], node
                last[touched] = node


def _is_random(action: StitchedGraph | FxNode) -> bool:
    if not isinstance(action, FxNode):
        return False
    is_nested = isinstance(action.target, HigherOrderOperator)
    return is_nested or draws_random_numbers(action.target, action.args, action.kwargs)


def results_to_copy(captured: CapturedGraph, module: GraphModule) -> frozenset[FxNode]:
    """Results that would share memory with an input, an attribute or a result with other memory.

    Capture leaves out copies, such as ``x ** 1``; the user may change a result in place.
    """
    graph, memory = captured.graph, shared_memory(module.graph.nodes)
    owner: dict[int, FxNode] = {}
    (output,) = module.graph.find_nodes(op="output")
    sources = [node for node in module.graph.nodes if node.op in ("placeholder", "get_attr")]
    copied = set()
    for node in (*sources, *output.all_input_nodes):
        index = captured.values[node]
        base = graph.base(index) if isinstance(index, int) else None
        if base is None or graph[base].kind == "constant":
            continue  # several tensors, or a tensor that each reading makes anew
        if owner.setdefault(base, memory[node]) is not memory[node]:
            copied.add(node)
    return frozenset(copied)


Explorer = Callable[[Graph], Kernels | Sequence[tuple[int, ...]]]
"""Function that finds the kernels of a region's graph, or a partition of its operators."""


@dataclass
class StitchedFunction:
    """A compiled function with generated kernels."""

    function: Callable[..., Any] = field(repr=False)
    graphs: list[StitchedModule] = field(default_factory=list)
    """The graphs that were traced so far, forward and backward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @property
    def unfused(self) -> Counter[tuple[str, str]]:
        """(reason, operator) of the calls that PyTorch runs, counted."""
        counts: Counter[tuple[str, str]] = Counter()
        for graph in self.graphs:
            counts += graph.unfused
        return counts

    @property
    def refused(self) -> Counter[tuple[str, str]]:
        """Earlier name of :attr:`unfused`, still accepted."""
        return self.unfused


def stitch_function(
    function: Callable[..., Any],
    *,
    explorer: Explorer = default_kernels,
    choice: PlanChooser = default_plan,
    folder: Path | None = None,
    dynamic: bool | None = False,
) -> StitchedFunction:
    """Compile a function or module to generated kernels, forward and backward.

    The function is traced when it is called, and traced again for other shapes. Calls that cannot
    be fused run in PyTorch and are counted in :attr:`StitchedFunction.unfused`.

    ``explorer`` partitions each region into kernels. ``choice`` selects the plan of each kernel: by
    the model, or by measurement with
    :class:`~nostall.fusion.codegen.autotune.autotuner.Autotuner`. ``folder`` is where generated
    sources are written. ``dynamic`` is that of ``torch.compile``: with True, or with None and
    ``mark_dynamic``, one leading dimension may change without tracing again.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    stitched = StitchedFunction(function)

    def compiler(module: GraphModule, _: Sequence[Any]) -> Any:
        graph = stitch_module(module, explorer, folder, choice)
        stitched.graphs.append(graph)
        return make_boxed_func(graph)

    backend = aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, decompositions=decompositions()
    )
    stitched.function = torch.compile(function, backend=backend, dynamic=dynamic)
    return stitched


fuse = stitch_function
"""Earlier name of :func:`stitch_function`, still accepted."""


@dataclass(frozen=True)
class StitchedModule:
    """An FX graph whose regions are generated kernels; called like the original graph."""

    module: GraphModule = field(repr=False)
    captured: CapturedGraph = field(repr=False)
    steps: tuple[Step, ...] = field(repr=False)
    """In the order in which they run."""
    copied: frozenset[FxNode] = frozenset()
    """Results that PyTorch has in memory of their own, and the captured graph has not."""

    @property
    def kernels(self) -> int:
        """The number of generated kernels in one run."""
        actions = (step.action for step in self.steps)
        return sum(action.kernels for action in actions if isinstance(action, StitchedGraph))

    @property
    def unfused(self) -> Counter[tuple[str, str]]:
        """(reason, operator) of the calls that PyTorch runs, counted."""
        counts: Counter[tuple[str, str]] = Counter(self.captured.report.unsupported)
        for step in self.steps:
            if isinstance(step.action, StitchedGraph):
                reasons = step.action.illegal_reasons
                counts.update({(reason, "no kernel"): n for reason, n in reasons.items()})
        return counts

    def __call__(self, *args: Any) -> Any:
        """The graph's outputs, in the structure of its output node."""
        graph, values = self.captured.graph, self.captured.values
        size = self._dynamic_size(args)
        device = next((a.device for a in args if isinstance(a, Tensor)), torch.device("cuda"))
        computed: dict[int, Any] = {}

        def read_value(index: int) -> Any:
            return eager.read_value(self.captured.graph, index, computed, size, device)

        def read_node(node: FxNode) -> Any:
            index = values[node]
            return read_value(index) if isinstance(index, int) else tuple(map(read_value, index))

        arguments = iter(args)
        for node in self.module.graph.nodes:
            if node.target is SEEDS:
                index = values[node]
                assert isinstance(index, int)
                computed[index] = node.target(*node.args)
            if node.op in ("placeholder", "get_attr"):
                index = values[node]
                assert isinstance(index, int)
                is_argument = node.op == "placeholder"
                attribute = None if is_argument else getattr(self.module, node.target)
                computed[index] = next(arguments) if is_argument else attribute
        for step in self.steps:
            if isinstance(step.action, StitchedGraph):
                known = part_of_size(size, graph.varying, step.action.graph.varying)
                results = step.action(*map(read_value, step.inputs), size=known, device=device)
            else:
                call = step.action
                operands, named = map_arg(call.args, read_node), map_arg(call.kwargs, read_node)
                results = (call.target(*operands, **named),)
            computed.update(zip(step.outputs, results, strict=True))
            for index in step.last_uses:
                del computed[index]

        def read_result(node: FxNode) -> Any:
            return read_node(node).clone() if node in self.copied else read_node(node)

        (output,) = self.module.graph.find_nodes(op="output")
        return map_arg(output.args[0], read_result)

    def _dynamic_size(self, args: Sequence[Any]) -> Size | None:
        """The values of the dynamic sizes in these arguments; None if all sizes are static."""
        captured, shapes, planned = self.captured, [], []
        for node, argument in zip(
            self.module.graph.find_nodes(op="placeholder"), args, strict=True
        ):
            index = captured.values[node]
            if isinstance(argument, Tensor) and isinstance(index, int):
                shapes.append(argument.shape)
                planned.append(captured.graph[index].shape)
            else:
                expression = getattr(getattr(node.meta["val"], "node", None), "expr", None)
                shapes.append((argument,))
                planned.append((captured.primes.get(expression, 1),))
        return SizeReader(captured.graph.varying, planned)(shapes)


def stitch_module(
    module: GraphModule,
    explorer: Explorer = default_kernels,
    folder: Path | None = None,
    choice: PlanChooser = default_plan,
) -> StitchedModule:
    """Capture a functional ATen graph and generate kernels for its regions."""
    module = hoist_slices(replace_random_ops(module))
    captured = capture(module)
    graph = captured.graph
    steps = []
    for region in captured_regions(captured):
        found = explorer(region.graph)
        kernels = found if isinstance(found, Kernels) else Kernels.of(region.graph, found)
        stitched = stitch(kernels.graph, kernels.groups, choice=choice, folder=folder)
        steps.append(Step(stitched, region.inputs, region.outputs))
    for index, node in captured.origins.items():
        if graph[index].kind == "opaque" and node.op == "call_function":
            inputs = {graph.base(i) for n in node.all_input_nodes for i in _indices(captured, n)}
            inputs = {i for i in inputs if graph[i].kind != "constant"}
            steps.append(Step(node, tuple(sorted(inputs)), (index,)))
    (output,) = module.graph.find_nodes(op="output")
    results = {graph.base(i) for node in output.all_input_nodes for i in _indices(captured, node)}
    ordered = order_steps(steps, results, module.graph.nodes, graph)
    return StitchedModule(module, captured, tuple(ordered), results_to_copy(captured, module))


def _indices(captured: CapturedGraph, node: FxNode) -> tuple[int, ...]:
    """The graph nodes of an FX node."""
    index = captured.values[node]
    return (index,) if isinstance(index, int) else index
