"""Source of kernels that compute one expression for the tensors of lists.

A launch takes the tensors as arguments: no table has to be written, so the kernels can be captured
in CUDA graphs.  Each program finds its slot by a binary search over the first blocks of the slots.
All elements of a block are read before one is written, and no other program reads them, so results
may replace operands in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nostall.fusion.codegen.emit.program import Launch
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.expressions.templates import (
    Value,
    compute_dtype,
    constant_value,
    expression,
    literal,
    to_storage,
)
from nostall.fusion.graph.graph import Graph
from nostall.fusion.lists.kernel import Layout, ListKernel, ListPlan, assemble, loaded
from nostall.fusion.lists.slots import (
    Slot,
    Span,
    int_scalar,
    spans,
    split_slots,
    write_selection,
)


@dataclass(frozen=True)
class Read:
    """A list that the kernel reads, by the indices of its arguments.

    ``tensors``: one argument for each slot; or one for all slots, which holds an element for each
    slot if ``by_slot``. ``numbers``: in place of tensors.
    """

    tensors: tuple[int, ...]
    dtype: str
    is_full: bool
    by_slot: bool = False
    numbers: tuple[float, ...] = ()


@dataclass(frozen=True)
class Write:
    """A result: the graph's node, and the arguments that receive it.

    ``tensors``: one argument for each slot, or one vector with an element for each slot.
    """

    value: int
    tensors: tuple[int, ...]
    dtype: str
    is_vector: bool = False


@dataclass(frozen=True)
class Pointwise:
    """What a pointwise kernel computes; the reads are in the order of the graph's inputs."""

    graph: Graph
    slots: tuple[Slot, ...]
    reads: tuple[Read, ...]
    writes: tuple[Write, ...]
    inputs: tuple[Layout, ...]
    mutated: int
    outputs: tuple[Layout, ...]
    from_the_end: bool = False
    """Whether blocks run from the last to the first: the end of a list that a kernel has just read
    is still in a cache."""


def pointwise_kernel(work: Pointwise, plan: ListPlan) -> ListKernel:
    """The kernel of a pointwise region.

    Raises :class:`Unsupported` if a slot has more tensors than a launch can take.
    """
    return _Writer(work, plan).kernel()


class _Writer:
    def __init__(self, work: Pointwise, plan: ListPlan) -> None:
        self.work = work
        largest = max(slot.elements for slot in work.slots)
        self.block = min(plan.block, max(32, 1 << (largest - 1).bit_length()))
        self.num_warps = max(1, min(plan.num_warps, self.block // 64))
        self.plan = plan
        sources = [each.tensors for each in work.reads] + [each.tensors for each in work.writes]
        count = len(work.slots)
        self.by_slot = tuple(dict.fromkeys(x for x in sources if len(x) == count > 1))
        self.shared = tuple(dict.fromkeys(x[0] for x in sources if x and x not in self.by_slot))

    def kernel(self) -> ListKernel:
        work = self.work
        kernels: list[tuple[Lines, Launch]] = []
        for wanted in split_slots(len(work.slots), len(self.by_slot), len(self.shared)):
            found = spans(work.slots, wanted, self.block)
            if found:
                kernels.append(self._launch(len(kernels), wanted, found))
        title = f"{self.plan}: {len(work.graph.operators)} operators of {len(work.slots)} tensors"
        count = len(work.inputs) + len(work.outputs)
        source, launches = assemble(title, kernels, count)
        return ListKernel(source, str(self.plan), work.inputs, work.mutated, work.outputs, launches)

    def _launch(
        self, number: int, wanted: Sequence[int], found: Sequence[Span]
    ) -> tuple[Lines, Launch]:
        tensors = [column[slot] for slot in wanted for column in self.by_slot]
        arguments = tuple(f"p{index}" for index in dict.fromkeys((*self.shared, *tensors)))
        blocks = found[-1].first + found[-1].blocks
        lines = Lines()
        with lines.block():
            at = "tl.program_id(0)"
            lines(f"pid = {blocks - 1} - {at}" if self.work.from_the_end else f"pid = {at}")
            write_selection(lines, found, self._write_leaf)
            lines(f"start = (pid - first) * {self.block}")
            lines(f"at = start + tl.arange(0, {self.block})[None, :]")
            with lines.block(f"if start + {self.block} <= n:"):
                self._write_body(lines, "")
            with lines.block("else:"):
                lines("inside = at < n")
                self._write_body(lines, "inside")
        launch = Launch(
            f"stitched_list_{number}", arguments, (), (blocks, 1), self.num_warps, count_names=()
        )
        return lines, launch

    def _write_leaf(self, lines: Lines, span: Span) -> None:
        slot = self.work.slots[span.slot]
        for number, column in enumerate(self.by_slot):
            lines(f"q{number} = p{column[span.slot]}")
        lines(f"n = {int_scalar(slot.elements)}")
        lines(f"first = {int_scalar(span.first)}")
        lines(f"slot = {int_scalar(span.slot)}")
        for number, read in enumerate(self.work.reads):
            if read.numbers:
                text = literal(read.numbers[span.slot], "float32")
                lines(f"c{number} = tl.full((), {text}, tl.float32)")

    def _pointer(self, tensors: tuple[int, ...]) -> str:
        if tensors in self.by_slot:
            return f"q{self.by_slot.index(tensors)}"
        return f"p{tensors[0]}"

    def _write_body(self, lines: Lines, mask: str) -> None:
        """The loads, the operators and the stores of a block."""
        graph, values = self.work.graph, dict[int, Value]()
        for number, (index, read) in enumerate(zip(graph.inputs, self.work.reads, strict=True)):
            lines(f"x{index} = {self._load(number, read, mask)}")
            values[index] = Value(f"x{index}", compute_dtype(read.dtype))
        operators = set(graph.operators)
        for node in graph:
            if node.kind == "constant":
                values[node.index] = constant_value(node)
            elif node.kind == "layout":
                if node.inputs[0] in values:
                    values[node.index] = values[node.inputs[0]]
            elif node.index in operators:
                lines(f"# {graph.describe(node.index)}")
                value = expression(node, [values[i] for i in node.inputs])
                lines(f"v{node.index} = {value.text}")
                values[node.index] = Value(f"v{node.index}", value.dtype)
        for write in self.work.writes:
            self._write_store(lines, write, values[write.value], mask)

    def _load(self, number: int, read: Read, mask: str) -> str:
        if read.numbers:
            return f"c{number}"
        pointer = self._pointer(read.tensors)
        if read.is_full:
            return loaded(pointer, "at", read.dtype, mask)
        # A scalar: Triton 3.6 would load a tensor of one element once for each lane of a thread.
        return loaded(pointer, "slot" if read.by_slot else "0", read.dtype)

    def _write_store(self, lines: Lines, write: Write, value: Value, mask: str) -> None:
        dtype = compute_dtype(write.dtype)
        text = value.text
        if value.number is not None:
            text = f"tl.full((1, 1), {literal(value.number, dtype)}, tl.{dtype})"
        pointer = self._pointer(write.tensors)
        place = "slot + at" if write.is_vector else "at"
        keep = f", mask={mask}" if mask else ""
        lines(f"tl.store({pointer} + {place}, {to_storage(text, write.dtype)}{keep})")
