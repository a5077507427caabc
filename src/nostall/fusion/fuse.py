"""A PyTorch function with its memory-intensive regions stitched, everything else as it was.

``torch.compile`` traces it and guards the result; each graph it hands over is captured, each region
between opaque operators becomes stitched kernels, and the opaque ones run as PyTorch runs them.
Whether that is faster than what the user had is for others to say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.fx.node import map_arg

from nostall.fusion.capture import Captured, capture
from nostall.fusion.capture.randomness import SEEDS, seeded
from nostall.fusion.capture.slicing import sliced_first
from nostall.fusion.capture.trace import decompositions
from nostall.fusion.codegen.cost.default_plan import default_plan
from nostall.fusion.codegen.emit.program import find_dynamic_size
from nostall.fusion.codegen.runtime import eager
from nostall.fusion.codegen.runtime.stitched_graph import PlanChooser, StitchedGraph, stitch
from nostall.fusion.explore.default_partition import explored
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.regions import regions

Explorer = Callable[[Graph], Sequence[tuple[int, ...]]]


@dataclass
class Fused:
    """A fused function; ``graphs`` grows with every graph that is traced for it."""

    function: Callable[..., Any] = field(repr=False)
    graphs: list[StitchedModule] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    @property
    def refused(self) -> Counter[tuple[str, str]]:
        """(reason, operator) of everything that was left to PyTorch."""
        found: Counter[tuple[str, str]] = Counter()
        for graph in self.graphs:
            found += graph.refused
        return found


def fuse(
    function: Callable[..., Any],
    *,
    explorer: Explorer = explored,
    choice: PlanChooser = default_plan,
    folder: Path | None = None,
    dynamic: bool | None = False,
) -> Fused:
    """``function`` (or module) with stitched kernels, forward and backward.

    It is traced when it is called, again for other shapes.  ``dynamic`` is that of
    ``torch.compile``: with True, or None and ``mark_dynamic``, one leading dimension may change
    without that.  ``choice`` takes the plan of each kernel: the modelled best one, or
    by measurement (:class:`~nostall.fusion.codegen.autotune.autotuner.Autotuner`).  What cannot be stitched runs as
    it was and is counted in :attr:`Fused.refused`.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    fused = Fused(function)

    def compiler(module: GraphModule, _: Sequence[Any]) -> Any:
        stitched = stitch_module(module, explorer, folder, choice)
        fused.graphs.append(stitched)
        return make_boxed_func(stitched)

    backend = aot_autograd(
        fw_compiler=compiler, bw_compiler=compiler, decompositions=decompositions()
    )
    fused.function = torch.compile(function, backend=backend, dynamic=dynamic)
    return fused


@dataclass(frozen=True)
class Step:
    """A stitched region or a call as it was.  Numbers are nodes of the captured graph: what the
    step reads and gives, and what nobody reads after it."""

    what: StitchedGraph | FxNode
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    last_read: tuple[int, ...] = ()


@dataclass(frozen=True)
class StitchedModule:
    """An FX graph whose regions are stitched: ``steps`` in the order in which they run."""

    module: GraphModule = field(repr=False)
    captured: Captured = field(repr=False)
    steps: tuple[Step, ...] = field(repr=False)

    @property
    def kernels(self) -> int:
        """Stitched kernels of one run."""
        stitched = (step.what for step in self.steps)
        return sum(s.kernels for s in stitched if isinstance(s, StitchedGraph))

    @property
    def refused(self) -> Counter[tuple[str, str]]:
        """(reason, operator) of what is left to PyTorch."""
        found: Counter[tuple[str, str]] = Counter(self.captured.explanation.refused)
        for step in self.steps:
            if isinstance(step.what, StitchedGraph):
                found.update(
                    {(why, "no kernel"): n for why, n in step.what.illegal_reasons.items()}
                )
        return found

    def __call__(self, *args: Any) -> Any:
        """The graph's outputs, as its output node has them."""
        values, size = self.captured.values, self._size(args)
        device = next((a.device for a in args if isinstance(a, Tensor)), torch.device("cuda"))
        known: dict[int, Any] = {}

        def value(index: int) -> Any:
            return eager.read_value(self.captured.graph, index, known, size, device)

        def held(node: FxNode) -> Any:
            place = values[node]
            return value(place) if isinstance(place, int) else tuple(map(value, place))

        given = iter(args)
        for node in self.module.graph.nodes:
            if node.target is SEEDS:
                place = values[node]
                assert isinstance(place, int)
                known[place] = node.target(*node.args)
            if node.op in ("placeholder", "get_attr"):
                place = values[node]
                assert isinstance(place, int)
                is_given = node.op == "placeholder"
                known[place] = next(given) if is_given else getattr(self.module, node.target)
        for step in self.steps:
            if isinstance(step.what, StitchedGraph):
                results = step.what(*map(value, step.reads), size=size)
            else:
                call = step.what
                arguments, named = map_arg(call.args, held), map_arg(call.kwargs, held)
                results = (call.target(*arguments, **named),)
            known.update(zip(step.gives, results, strict=True))
            for index in step.last_read:
                del known[index]
        (output,) = self.module.graph.find_nodes(op="output")
        return map_arg(output.args[0], held)

    def _size(self, args: Sequence[Any]) -> int | None:
        """The size that varies, as these arguments show it."""
        graph = self.captured.graph
        if graph.varying is None:
            return None
        given = self.module.graph.find_nodes(op="placeholder")
        for node, argument in zip(given, args, strict=True):
            place = self.captured.values[node]
            if isinstance(argument, Tensor) and isinstance(place, int):
                found = find_dynamic_size(graph, [place], [argument])
                if found is not None:
                    return found
            elif (
                getattr(getattr(node.meta["val"], "node", None), "expr", 0) == self.captured.symbol
            ):
                return int(argument)
        return None


def stitch_module(
    module: GraphModule,
    explorer: Explorer = explored,
    folder: Path | None = None,
    choice: PlanChooser = default_plan,
) -> StitchedModule:
    """Capture a functional ATen graph and stitch its regions."""
    module = sliced_first(seeded(module))
    captured = capture(module)
    graph = captured.graph
    steps = []
    for part in regions(graph):
        stitched = stitch(part.graph, explorer(part.graph), choice=choice, folder=folder)
        steps.append(Step(stitched, part.reads, part.gives))
    for index, node in captured.origins.items():
        if graph[index].kind == "opaque" and node.op == "call_function":
            reads = {graph.base(i) for n in node.all_input_nodes for i in _places(captured, n)}
            reads = {i for i in reads if graph[i].kind != "constant"}
            steps.append(Step(node, tuple(sorted(reads)), (index,)))
    (output,) = module.graph.find_nodes(op="output")
    kept = {graph.base(i) for node in output.all_input_nodes for i in _places(captured, node)}
    return StitchedModule(module, captured, tuple(_in_order(steps, kept)))


def _places(captured: Captured, node: FxNode) -> tuple[int, ...]:
    place = captured.values[node]
    return (place,) if isinstance(place, int) else place


def _in_order(steps: list[Step], kept: set[int]) -> list[Step]:
    """Steps behind those whose results they read, each with the values that end with it."""
    giver = {index: at for at, step in enumerate(steps) for index in step.gives}
    before = {
        at: [giver[index] for index in step.reads if index in giver]
        for at, step in enumerate(steps)
    }
    ordered = [steps[at] for at in TopologicalSorter(before).static_order()]
    seen = set(kept)
    found = []
    for step in reversed(ordered):
        # Results that nobody reads end at once; an unused result of a call is one.
        ends = {*step.reads, *step.gives} - seen
        seen |= ends
        found.append(replace(step, last_read=tuple(sorted(ends))))
    return found[::-1]
