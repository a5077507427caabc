"""Replace calls over lists of tensors, such as those of optimisers, by kernels over lists.

Equal updates that are written as a loop over tensors become lists first.  Results that the graph
copies into its arguments are written there.  Norms of a list become a vector, and a concatenation
of them is that vector.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from nostall.attach.torch_compile.rewrite.kernel_selection import (
    PRODUCTS_ONLY,
    KernelFilter,
    RewriteResult,
)
from nostall.attach.torch_compile.rewrite.list_grouping import (
    group_updates,
    ungroup_updates,
)
from nostall.attach.torch_compile.rewrite.list_order import (
    changes_only_at_the_end,
    sort_nodes,
)
from nostall.attach.torch_compile.rewrite.list_work import ListWork, norm_work, pointwise_work
from nostall.attach.torch_compile.rewrite.matching import fill_metadata
from nostall.attach.torch_compile.rewrite.node_order import OrderingConflict
from nostall.attach.torch_compile.runtime.list_op import LISTS_OP
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.fusion.capture.call import Unsupported
from nostall.fusion.hardware import Hardware, hardware_of
from nostall.fusion.lists.calls import is_list_call
from nostall.fusion.lists.expression import Packed
from nostall.fusion.lists.kernel import ListPlan, plan_for
from nostall.fusion.lists.regions import FoundLists, find_lists

aten = torch.ops.aten
MUTATION_INSIDE = "a graph that changes tensors between its calls"


def has_list_calls(module: GraphModule) -> bool:
    """Whether a graph calls operators of lists."""
    return any(is_list_call(node) for node in module.graph.nodes)


def insert_list_kernels(
    module: GraphModule,
    store: KernelStore,
    kernel_filter: KernelFilter,
    result: RewriteResult,
    plan: ListPlan | None = None,
) -> list[str]:
    """Insert kernels over lists into a functional ATen graph, in place; returns an explanation.

    The kernels, and the calls that stay as they are, are added to ``result``.  ``plan``: by default
    that of the GPU that the first list is on.
    """
    graph = module.graph
    if not changes_only_at_the_end(graph):
        if not has_list_calls(module):
            return []
        result.not_fused[MUTATION_INSIDE, "whole graph"] += 1
        return [f"lists of tensors stay with Inductor: {MUTATION_INSIDE}"]
    if kernel_filter.products_only:
        if not has_list_calls(module):
            return []
        result.not_fused[PRODUCTS_ONLY, "lists of tensors"] += 1
        return [f"lists of tensors stay with Inductor: {PRODUCTS_ONLY}"]
    fill_metadata(graph)
    grouped = group_updates(graph)
    if not has_list_calls(module):
        return []
    editor = _Editor(graph, store, kernel_filter, plan or plan_for(_hardware(graph)))
    found = editor.run()
    tensors = ungroup_updates(graph, grouped)
    result.not_fused.update(found.refused)
    result.kernels += editor.kernels
    if editor.kernels or grouped:
        module.recompile()
    refused = [f"  {n} x {name}: {reason}" for (reason, name), n in sorted(found.refused.items())]
    head = f"{len(editor.kernels)} kernels over lists of tensors"
    if tensors:
        head += f"; equal updates of {tensors} tensors, written as a loop, are lists"
    return [head, *editor.lines, *refused]


class _Editor:
    """Replaces one region after another; each changes what the next one reads."""

    def __init__(
        self, graph: Graph, store: KernelStore, kernel_filter: KernelFilter, plan: ListPlan
    ) -> None:
        self.graph, self.store, self.filter, self.plan = graph, store, kernel_filter, plan
        self.packed: dict[Node, Packed] = {}
        self.kernels: list[str] = []
        self.lines: list[str] = []
        # The last nodes of regions that stay as they are.
        self.kept: set[Node] = set()

    def run(self) -> FoundLists:
        """Replace what can be replaced; returns the calls that stay, with the reasons."""
        refused = find_lists(self.graph).refused
        while (work := self._next(refused)) is not None:
            self._replace(work)
        return FoundLists(refused=refused)

    def _next(self, refused: Any) -> ListWork | None:
        """The next kernel to insert; adds regions without one to ``refused``."""
        found = find_lists(self.graph)
        position = {node: at for at, node in enumerate(self.graph.nodes)}
        regions = sorted(found.regions, key=lambda each: position[each.nodes[-1]])
        for call in found.norms:
            if call.node not in self.kept:
                with self._refusal([call.node], refused):
                    return self._accepted(norm_work(call, self.plan))
        for region in regions:
            if region.nodes[-1] not in self.kept:
                with self._refusal(region.nodes, refused):
                    return self._accepted(
                        pointwise_work(self.graph, region, self.packed, self.plan)
                    )
        return None

    @contextlib.contextmanager
    def _refusal(self, nodes: Sequence[Node], refused: Any) -> Any:
        try:
            yield
        except Unsupported as reason:
            self.kept.add(nodes[-1])
            for node in nodes:
                refused[str(reason), str(node.target)] += 1

    def _accepted(self, work: ListWork) -> ListWork:
        """The work; raises :class:`Unsupported` if its kernel stays with Inductor."""
        if work.name(self.store) in self.filter.kept_in_inductor:
            raise Unsupported("not faster than Inductor's code for it, or not accurate")
        return work

    def _replace(self, work: ListWork) -> None:
        """Insert the call of a kernel, and give its results to their readers."""
        graph, name = self.graph, work.name(self.store)
        with graph.inserting_after(work.nodes[-1]):
            call = graph.call_function(LISTS_OP, (list(work.changed), list(work.inputs), name))
        values = [[x.meta["val"] for x in each] for each in (work.changed, work.inputs)]
        with _fake_mode((*work.changed, *work.inputs)):
            call.meta["val"] = LISTS_OP(*values, name)
        call.meta["eager_input_vals"] = (*values, name), {}
        for copy in work.copies:
            graph.erase_node(copy)
        after = call
        for number, output in enumerate(work.outputs):
            after = self._add(after, operator.getitem, (call, number))
            if output.slots is None:
                self._replace_result(output.results[0], after)
                continue
            vector = after
            for slot, node in enumerate(output.results):
                if node is None:
                    continue
                after = element = self._add(after, aten.select.int, (vector, 0, slot))
                if output.slots[slot].shape:
                    shape = list(output.slots[slot].shape)
                    after = element = self._add(after, aten.view.default, (element, shape))
                self.packed[element] = Packed(vector, slot)
                self._replace_result(node, element)
        _erase_unused(graph)
        try:
            sort_nodes(graph)
        except OrderingConflict as error:  # excluded by the rules of pointwise_work
            raise AssertionError(error) from error
        self._join_vectors()
        self.kernels.append(name)
        self.lines.append(f"  {name[:12]}: {work.description}")

    def _replace_result(self, node: Node | None, new: Node) -> None:
        if node is not None:
            new.meta = {**node.meta, "val": new.meta["val"]}
            node.replace_all_uses_with(new)

    def _add(self, after: Node, target: Any, args: tuple[Any, ...]) -> Node:
        with self.graph.inserting_after(after):
            node = self.graph.call_function(target, args)
        first = args[0]
        with _fake_mode([first]):
            node.meta["val"] = target(*torch.fx.map_arg(args, lambda x: x.meta["val"]))
        return node

    def _join_vectors(self) -> None:
        """Replace concatenations of all elements of vectors by the vectors."""
        for node in list(self.graph.nodes):
            if node.target is not aten.cat.default or (len(node.args) > 1 and node.args[1] != 0):
                continue
            vectors = self._whole_vectors(node.args[0])
            if not vectors:
                continue
            joined = vectors[0]
            if len(vectors) > 1:
                with self.graph.inserting_before(node):
                    joined = self.graph.call_function(aten.cat.default, (vectors,))
                joined.meta = dict(node.meta)
            node.replace_all_uses_with(joined)
        _erase_unused(self.graph)

    def _whole_vectors(self, parts: Any) -> list[Node]:
        """The vectors whose elements, each one an axis longer, are the parts; [] for others."""
        vectors: list[Node] = []
        for start in range(len(parts)):
            if sum(len(v.meta["val"]) for v in vectors) > start:
                continue
            element = self._element(parts[start])
            if element is None or element.slot:
                return []
            length = len(element.vector.meta["val"])
            run = [self._element(part) for part in parts[start : start + length]]
            if run != [Packed(element.vector, slot) for slot in range(length)]:
                return []
            vectors.append(element.vector)
        return vectors

    def _element(self, part: Any) -> Packed | None:
        if not isinstance(part, Node) or part.target not in (
            aten.unsqueeze.default,
            aten.view.default,
            aten.reshape.default,
        ):
            return None
        base = part.args[0]
        if not isinstance(base, Node) or tuple(part.meta["val"].shape) != (1,):
            return None
        return self.packed.get(base)


def _hardware(graph: Graph) -> Hardware:
    """The GPU of the first tensor of a list."""
    calls = filter(is_list_call, graph.nodes)
    devices = (tensor.device for call in calls for tensor in call.meta["val"])
    return hardware_of(next(devices, torch.device("cpu")))


def _fake_mode(nodes: Sequence[Node]) -> Any:
    values = [node.meta["val"] for node in nodes]
    flat = [x for v in values for x in (v if isinstance(v, (list, tuple)) else [v])]
    modes = (getattr(value, "fake_mode", None) for value in flat)
    return next((mode for mode in modes if mode is not None), contextlib.nullcontext())


def _erase_unused(graph: Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not node.is_impure():
            graph.erase_node(node)
