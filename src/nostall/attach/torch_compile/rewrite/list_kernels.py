"""Replace calls over lists of tensors, such as those of optimisers, by kernels over lists.

Equal updates that are written as a loop over tensors become lists first.  Results that the graph
copies into its arguments are written there.  Norms of a list become a vector, and a concatenation
of them is that vector.

What one kernel over lists replaces in an FX graph: its arguments, results and copies.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from nostall.attach.torch_compile.rewrite.kernel_selection import (
    PRODUCTS_ONLY,
    KernelFilter,
    RewriteResult,
)
from nostall.attach.torch_compile.rewrite.list_grouping import group_updates, ungroup_updates
from nostall.attach.torch_compile.rewrite.nodes import (
    COPY,
    OrderingConflict,
    changed_tensors,
    changes_only_at_the_end,
    erase_unused,
    fake_mode,
    fill_metadata,
    readers,
    sort_nodes,
    viewed_tensor,
)
from nostall.attach.torch_compile.runtime.list_op import LISTS_OP
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.fusion.capture.call import Unsupported, dtype_name
from nostall.fusion.hardware import Hardware, hardware_of
from nostall.fusion.lists.calls import NormCall, is_list_call, is_norm, results
from nostall.fusion.lists.expression import Operand, Packed, PackedNodes, build_expression
from nostall.fusion.lists.kernel import Layout, ListKernel, ListPlan, plan_for
from nostall.fusion.lists.norms import norm_kernel
from nostall.fusion.lists.pointwise import Pointwise, Read, Write, pointwise_kernel
from nostall.fusion.lists.regions import FoundLists, Region, find_lists
from nostall.fusion.lists.slots import Slot, has_same_memory_order, slot_of


@dataclass(frozen=True)
class Output:
    """A tensor that the kernel returns, and the nodes that it replaces."""

    results: tuple[Node | None, ...]
    """One node; or one for each element of a vector, None where the graph reads none."""
    slots: tuple[Slot, ...] | None = None
    """Layouts of the elements if the output is a vector of them."""


@dataclass(frozen=True)
class ListWork:
    """A kernel over lists, and what it replaces."""

    kernel: ListKernel
    nodes: tuple[Node, ...]
    """The calls that it computes, in order."""
    changed: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Output, ...]
    copies: tuple[Node, ...]
    """Copies into arguments that the kernel makes itself."""
    description: str

    def name(self, store: KernelStore) -> str:
        """The name of the kernel, which is written to the store."""
        return store.put(self.kernel)


def norm_work(call: NormCall, plan: ListPlan) -> ListWork:
    """The kernel of a call of norms.  Raises :class:`Unsupported` with the reason."""
    values = [node.meta["val"] for node in call.tensors]
    slots = tuple(map(slot_of, values))
    dtype, result_dtype = (dtype_name(x[0].dtype) for x in (values, call.node.meta["val"]))
    kernel = norm_kernel(slots, call.order, dtype, result_dtype, plan)
    found = results(call.node)
    single = tuple(Slot((), ()) for _ in slots)
    output = Output(tuple(found.get(slot) for slot in range(len(slots))), single)
    launches = len(kernel.launches)
    description = f"norms of {len(slots)} tensors in {launches} launches"
    return ListWork(kernel, (call.node,), (), call.tensors, (output,), (), description)


@dataclass
class _Arguments:
    """Numbers the tensors of a kernel: those it changes, other inputs, outputs."""

    changed: dict[Node, int] = field(default_factory=dict)
    inputs: dict[Node, int] = field(default_factory=dict)
    layouts: list[Layout] = field(default_factory=list)

    def change(self, nodes: Sequence[Node]) -> tuple[int, ...]:
        return tuple(self._number(node, self.changed) for node in nodes)

    def read(self, nodes: Sequence[Node]) -> tuple[int, ...]:
        return tuple(
            self.changed[node] if node in self.changed else self._number(node, self.inputs)
            for node in nodes
        )

    def returned(
        self, result: _Result, slots: Sequence[Slot]
    ) -> tuple[tuple[int, ...], list[Output]]:
        """Outputs for a result: a vector if its tensors have one element, else one for each."""
        start, dtype = len(self.layouts), _dtype(result.call)
        if all(slot.elements == 1 for slot in slots):
            self.layouts.append(Layout((len(slots),), (1,), dtype))
            return (start,), [Output(result.nodes, tuple(slots))]
        self.layouts += [Layout(slot.shape, slot.strides, dtype) for slot in slots]
        numbers = tuple(range(start, start + len(slots)))
        return numbers, [Output((node,)) for node in result.nodes]

    def _number(self, node: Node, table: dict[Node, int]) -> int:
        if node not in table:
            table[node] = len(self.layouts)
            self.layouts.append(_layout(node.meta["val"]))
        return table[node]


@dataclass(frozen=True)
class _Result:
    """The results of one call that other nodes read."""

    call: Node
    nodes: tuple[Node | None, ...]
    copies: tuple[Node, ...]
    """Copies of all results into arguments, in order; empty if the kernel cannot make them."""
    is_read: bool
    """Whether the kernel returns the results: not only those copies read them."""

    @property
    def targets(self) -> list[Node]:
        """Arguments of the graph that the copies overwrite."""
        return [changed_tensors(copy)[0] for copy in self.copies]


def pointwise_work(graph: Graph, region: Region, packed: PackedNodes, plan: ListPlan) -> ListWork:
    """The kernel of a region.  Raises :class:`Unsupported` with the reason if there is none."""
    expression = build_expression(region.calls, region.slots, packed)
    found = list(_results(graph, region, expression.operands))
    if not found:
        raise Unsupported("results that nothing reads")
    arguments = _Arguments()
    writes = [
        Write(expression.values[each.call], arguments.change(each.targets), _dtype(each.call))
        for each in found
        if each.copies
    ]
    reads = tuple(_read(operand, arguments) for operand in expression.operands)
    inputs = tuple(arguments.layouts)
    outputs: list[Output] = []
    for each in found:
        if each.is_read:
            tensors, own = arguments.returned(each, region.slots)
            value, dtype = expression.values[each.call], _dtype(each.call)
            writes.append(Write(value, tensors, dtype, is_vector=own[0].slots is not None))
            outputs += own
    work = Pointwise(
        expression.graph,
        region.slots,
        reads,
        tuple(writes),
        inputs,
        len(arguments.changed),
        tuple(arguments.layouts[len(inputs) :]),
        _follows_norms(expression.operands),
    )
    kernel = pointwise_kernel(work, plan)
    if not kernel.launches:
        raise Unsupported("an empty list")
    return ListWork(
        kernel,
        tuple(region.nodes),
        tuple(arguments.changed),
        tuple(arguments.inputs),
        tuple(outputs),
        tuple(copy for each in found for copy in each.copies),
        f"{len(region.calls)} calls over {len(region.slots)} tensors in "
        f"{len(kernel.launches)} launches; {len(arguments.changed)} tensors changed in place",
    )


def _read(operand: Operand, arguments: _Arguments) -> Read:
    tensors = arguments.read(operand.nodes)
    is_full, by_slot = operand.kind == "full", operand.kind == "packed"
    return Read(tensors, operand.dtype, is_full, by_slot, operand.numbers)


def _results(graph: Graph, region: Region, operands: Sequence[Operand]) -> Iterator[_Result]:
    """The results of a region's calls that other nodes read."""
    inside = set(region.nodes)
    below = _descendants(graph, inside)
    own = {result for node in inside for result in node.users}
    if any(x in below and x not in own for node in inside for x in node.all_input_nodes):
        raise Unsupported("a kernel between its calls changes a tensor in place")
    targets = Counter[Node]()
    for node in graph.nodes:
        targets.update(changed_tensors(node))
    for call in region.calls:
        found = results(call.node)
        nodes = tuple(found.get(slot) for slot in range(len(region.slots)))
        users = {user for node in nodes if node for user in node.users if user not in inside}
        if not users:
            continue
        copies = [_copy_of(node) for node in nodes]
        single = [copy for copy in copies if copy is not None]
        is_legal = len(single) == len(nodes) and all(
            targets[changed_tensors(copy)[0]] == 1
            and _can_replace(changed_tensors(copy)[0], slot, region, operands, inside, below)
            and changed_tensors(copy)[0].meta["val"].dtype == node.meta["val"].dtype  # type: ignore[union-attr]
            for slot, (copy, node) in enumerate(zip(single, nodes, strict=True))
        )
        made = tuple(single) if is_legal else ()
        yield _Result(call.node, nodes, made, bool(users - set(made)))


def _copy_of(node: Node | None) -> Node | None:
    """The copy of a result into an argument; None if there is none, or more than one."""
    copies = [user for user in node.users if user.target is COPY] if node is not None else []
    is_single = len(copies) == 1 and copies[0].args[1] is node and not copies[0].users
    return copies[0] if is_single and changed_tensors(copies[0])[0].op == "placeholder" else None


def _can_replace(
    tensor: Node,
    slot: int,
    region: Region,
    operands: Sequence[Operand],
    inside: set[Node],
    below: set[Node],
) -> bool:
    """Whether a kernel may overwrite a tensor with the result of a slot.

    Only the blocks of that slot may read it, element by element, and no node that runs after the
    kernel may need the old value.
    """
    if not has_same_memory_order(slot_of(tensor.meta["val"]), region.slots[slot]):
        return False
    for operand in operands:
        for place, node in enumerate(operand.nodes):
            is_own = operand.kind == "full" and place == slot
            if viewed_tensor(node) is tensor and not (is_own and _is_whole(node, tensor)):
                return False
    others = (reader for reader in readers(tensor) if reader not in inside)
    return not any(reader in below for reader in others if tensor not in changed_tensors(reader))


def _is_whole(node: Node, tensor: Node) -> bool:
    """Whether a tensor or a view of it has all elements of the tensor."""
    return node is tensor or node.meta["val"].numel() == tensor.meta["val"].numel()


def _descendants(graph: Graph, nodes: set[Node]) -> set[Node]:
    """All nodes that run after one of ``nodes``, but the output.

    Those are the nodes that depend on one of them, and copies and kernels that change a tensor in
    place which such a node reads.
    """
    below: set[Node] = set()
    for node in graph.nodes:
        if node.op == "output" or node in nodes:
            continue
        before = {*node.all_input_nodes}
        for tensor in changed_tensors(node):
            before.update(each for each in readers(tensor) if each is not node)
        if before & nodes or before & below:
            below.add(node)
    return below


def _follows_norms(operands: Sequence[Operand]) -> bool:
    """Whether a kernel of norms in this graph reads a list that this kernel reads, too."""
    return any(
        (user.target is LISTS_OP and not user.args[0]) or is_norm(user)
        for operand in operands
        if operand.kind == "full"
        for node in operand.nodes[:1]
        for user in node.users
    )


def _dtype(call: Node) -> str:
    return dtype_name(call.meta["val"][0].dtype)


def _layout(value: Any) -> Layout:
    return Layout(tuple(value.shape), tuple(value.stride()), dtype_name(value.dtype))


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
        with fake_mode((*work.changed, *work.inputs)):
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
        erase_unused(graph)
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
        with fake_mode([first]):
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
        erase_unused(self.graph)

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
