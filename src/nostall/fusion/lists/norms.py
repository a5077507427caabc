"""Source of kernels that compute one norm of each tensor of a list.

The first launches read all tensors: each program adds up a part of one tensor.  The last launch
adds the parts of each tensor.  The parts and their order depend on the sizes only, so equal tensors
have equal norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nostall.fusion.codegen.emit.program import Launch, Workspace
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.expressions.templates import to_storage
from nostall.fusion.lists.kernel import Layout, ListKernel, ListPlan, assemble, loaded
from nostall.fusion.lists.slots import (
    Slot,
    Span,
    int_scalar,
    spans,
    split_slots,
    write_selection,
)

PARTS = "parts"
"""Name of the workspace between the launches."""
PARTS_BLOCK = 1024
"""Parts that the last launch reads at once."""


@dataclass(frozen=True)
class _Norm:
    """Text of a norm: of one element, of two partial results, of a row of them, of the result."""

    element: str
    combined: str
    row: str
    result: str


_NORMS = {
    1.0: _Norm("tl.abs({})", "{} + {}", "tl.sum({}, 1)", "{}"),
    2.0: _Norm("{0} * {0}", "{} + {}", "tl.sum({}, 1)", "tl.sqrt_rn({})"),
    float("inf"): _Norm("tl.abs({})", "_max({}, {})", "tl.reduce({}, 1, _max)", "{}"),
}


def norm_kernel(
    slots: Sequence[Slot], order: float, dtype: str, result_dtype: str, plan: ListPlan
) -> ListKernel:
    """The kernel of the norms of tensors; its result is a vector with one element for each.

    ``order``: 1, 2 or infinity.  Raises :class:`Unsupported` if a launch cannot take the tensors.
    """
    chunk = _chunk(slots, plan)
    norm = _NORMS[order]
    kernels: list[tuple[Lines, Launch]] = []
    parts: list[Span] = []
    done = 0
    for wanted in split_slots(len(slots), 1, 1):
        found = spans(slots, wanted, chunk)
        if found:
            kernels.append(_partial_launch(len(kernels), slots, found, norm, dtype, plan, done))
            parts += [Span(span.slot, done + span.first, span.blocks) for span in found]
            done += found[-1].first + found[-1].blocks
    result = f"p{len(slots)}"
    kernels.append(_final_launch(len(kernels), slots, parts, norm, result, result_dtype))
    title = f"{plan}: norms of order {order} of {len(slots)} tensors, {chunk} elements a program"
    source, launches = assemble(title, kernels, len(slots) + 1)
    return ListKernel(
        source,
        str(plan),
        tuple(Layout(slot.shape, slot.strides, dtype) for slot in slots),
        0,
        (Layout((len(slots),), (1,), result_dtype),),
        launches,
        (Workspace(PARTS, "float32", done),),
    )


def _chunk(slots: Sequence[Slot], plan: ListPlan) -> int:
    """Elements of a program: a power of two, so many that the plan's programs read all tensors."""
    elements = sum(slot.elements for slot in slots)
    wanted = -(-elements // plan.norm_programs)
    return min(1 << 16, max(plan.norm_block, 1 << (wanted - 1).bit_length()))


def _partial_launch(
    number: int,
    slots: Sequence[Slot],
    found: Sequence[Span],
    norm: _Norm,
    dtype: str,
    plan: ListPlan,
    done: int,
) -> tuple[Lines, Launch]:
    """A launch that writes the parts ``done``, ``done + 1`` … of some slots."""
    chunk, block = _chunk(slots, plan), plan.norm_block

    def write_leaf(lines: Lines, span: Span) -> None:
        lines(f"q0 = p{span.slot}")
        lines(f"n = {int_scalar(slots[span.slot].elements)}")
        lines(f"first = {int_scalar(span.first)}")

    def write_step(lines: Lines, mask: str) -> None:
        lines(f"x = {loaded('q0', 'at', dtype, f'{mask}, other=0.0' if mask else '')}")
        lines(f"total = {norm.combined.format('total', norm.element.format('x'))}")

    lines = Lines()
    with lines.block():
        lines("pid = tl.program_id(0)")
        write_selection(lines, found, write_leaf)
        lines(f"start = (pid - first) * {chunk}")
        lines(f"lanes = tl.arange(0, {block})[None, :]")
        lines(f"total = tl.zeros((1, {block}), tl.float32)")
        with lines.block(f"if start + {chunk} <= n:"):  # noqa: SIM117
            with lines.block(f"for i in range(0, {chunk}, {block}):"):
                lines("at = start + i + lanes")
                write_step(lines, "")
        with lines.block("else:"):  # noqa: SIM117
            with lines.block(f"for i in range(0, n - start, {block}):"):
                lines("at = start + i + lanes")
                write_step(lines, "at < n")
        place = f"{PARTS} + {done} + pid + tl.zeros((1,), tl.int32)"
        lines(f"tl.store({place}, {norm.row.format('total')})")
    arguments = (*(f"p{span.slot}" for span in found), PARTS)
    blocks = found[-1].first + found[-1].blocks
    launch = Launch(
        f"stitched_norms_{number}", arguments, (), (blocks, 1), plan.norm_warps, count_names=()
    )
    return lines, launch


def _final_launch(
    number: int,
    slots: Sequence[Slot],
    parts: Sequence[Span],
    norm: _Norm,
    result: str,
    dtype: str,
) -> tuple[Lines, Launch]:
    """The launch that adds the parts of each slot; one program for each."""
    by_slot = {span.slot: span for span in parts}
    programs = [Span(slot, slot, 1) for slot in range(len(slots))]

    def write_leaf(lines: Lines, span: Span) -> None:
        own = by_slot.get(span.slot, Span(span.slot, 0, 0))
        lines(f"first = {int_scalar(own.first)}")
        lines(f"n = {int_scalar(own.blocks)}")

    lines = Lines()
    with lines.block():
        lines("pid = tl.program_id(0)")
        write_selection(lines, programs, write_leaf)
        lines(f"lanes = tl.arange(0, {PARTS_BLOCK})[None, :]")
        lines(f"total = tl.zeros((1, {PARTS_BLOCK}), tl.float32)")
        with lines.block(f"for i in range(0, n, {PARTS_BLOCK}):"):
            lines(f"part = tl.load({PARTS} + first + i + lanes, mask=i + lanes < n, other=0.0)")
            lines(f"total = {norm.combined.format('total', 'part')}")
        lines(f"norm = {norm.result.format(norm.row.format('total'))}")
        place = f"{result} + pid + tl.zeros((1,), tl.int32)"
        lines(f"tl.store({place}, {to_storage('norm', dtype)})")
    launch = Launch(
        f"stitched_norms_{number}", (PARTS, result), (), (len(slots), 1), 4, count_names=()
    )
    return lines, launch
