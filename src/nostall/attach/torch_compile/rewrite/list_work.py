"""What one kernel over lists replaces in an FX graph: its arguments, results and copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, Node

from nostall.attach.torch_compile.rewrite.list_order import (
    COPY,
    changed_tensors,
    readers,
    viewed_tensor,
)
from nostall.attach.torch_compile.runtime.list_op import LISTS_OP
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.fusion.capture.call import Unsupported, dtype_name
from nostall.fusion.lists.calls import NormCall, is_norm, results
from nostall.fusion.lists.expression import Operand, PackedNodes, build_expression
from nostall.fusion.lists.kernel import Layout, ListKernel, ListPlan
from nostall.fusion.lists.norms import norm_kernel
from nostall.fusion.lists.pointwise import Pointwise, Read, Write, pointwise_kernel
from nostall.fusion.lists.regions import Region
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
        return store.put_list_kernel(self.kernel)


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
