"""Order violations: instructions that move past others that they depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from nostall.sass.program import Function, Instruction, Program
from tests.mutations.edits import (
    ALU,
    BARRIERS,
    MEMORY_ACCESSES,
    Edit,
    block_mutation,
    blocks,
    has_barrier,
    may_both_execute,
    mutation,
    shift_edit,
    unit_number,
)

Order = Sequence[Instruction]
_LOADS_OF = {"STG": ("LDG",), "STS": ("LDS", "LDSM"), "STL": ("LDL",)}
_ATOMICS = ("ATOM", "ATOMG", "ATOMS", "RED", "REDG")


def _neighbours(order: Order) -> Iterator[tuple[int, Instruction, Instruction]]:
    """(position, instruction, next instruction) of neighbours that could be exchanged."""
    for at in range(len(order) - 1):
        first, second = order[at], order[at + 1]
        if has_barrier(order, at, at + 1) or first.payload == second.payload:
            continue
        if may_both_execute(first, second):
            yield at, first, second


def _raw_swap(order: Order) -> Iterator[Edit]:
    """A reader moves before the writer of its source."""
    for at, first, second in _neighbours(order):
        if set(first.defs) & set(second.uses):
            yield Edit(move=(at, at + 1))


def _war_swap(order: Order) -> Iterator[Edit]:
    """A writer moves before the last reader of the old value."""
    for at, first, second in _neighbours(order):
        if set(first.uses) & set(second.defs) and not set(first.defs) & set(second.uses):
            yield Edit(move=(at, at + 1))


def _waw_swap(order: Order) -> Iterator[Edit]:
    """A writer moves after the next writer of its register, whose value is then lost."""
    for at, first in enumerate(order):
        if not first.defs or first.is_guarded or first.base in BARRIERS:
            continue
        for later in range(at + 1, min(at + 24, len(order))):
            both = set(first.defs) & set(order[later].defs)
            if both:
                if not has_barrier(order, at, later) and _is_read_after(order, later, both):
                    yield Edit(move=(at, later))
                break


def _is_read_after(order: Order, at: int, registers: set[int]) -> bool:
    """Whether a value of ``registers`` at ``at`` is read later in the block, without a guard."""
    for instruction in order[at + 1 :]:
        if registers & set(instruction.uses):
            return not instruction.is_guarded
        if registers & set(instruction.defs):
            return False
    return False


def _across(
    order: Order, is_fence: Callable[[Instruction], bool], mover: Callable[[Instruction], bool]
) -> Iterator[Edit]:
    """The nearest instruction on each side of a fence moves to the other side.

    ``mover`` selects the instructions that may move.
    """
    for at, fence in enumerate(order):
        if not is_fence(fence):
            continue
        for k in range(at - 1, max(at - 12, -1), -1):
            if mover(order[k]):
                yield Edit(move=(k, at))
                break
        for k in range(at + 1, min(at + 12, len(order))):
            if mover(order[k]):
                yield Edit(move=(k, at))
                break


def _is_access(instruction: Instruction) -> bool:
    return instruction.base in MEMORY_ACCESSES and not instruction.never_executes


def _across_barrier(order: Order) -> Iterator[Edit]:
    """A memory access moves across a barrier of the thread block."""
    yield from _across(order, lambda i: i.base == "BAR", _is_access)


def _across_fence(order: Order) -> Iterator[Edit]:
    """A memory access moves across a memory barrier or cache control."""
    fences = ("MEMBAR", "ERRBAR", "CCTL", "FENCE")
    yield from _across(order, lambda i: i.base in fences, _is_access)


def _across_atomic(order: Order) -> Iterator[Edit]:
    """A memory access moves across an atomic operation or a strong access."""

    def is_fence(instruction: Instruction) -> bool:
        strong = _is_access(instruction) and "STRONG" in instruction.modifiers
        return instruction.base in _ATOMICS or strong

    yield from _across(order, is_fence, _is_access)


def _across_commit(order: Order) -> Iterator[Edit]:
    """An asynchronous copy moves into another group."""
    yield from _across(order, lambda i: i.base == "LDGDEPBAR", lambda i: i.base == "LDGSTS")


def _across_counted_wait(order: Order) -> Iterator[Edit]:
    """An access moves across a DEPBAR, which waits for all groups except the last few."""
    yield from _across(order, lambda i: i.base == "DEPBAR", _is_access)


def _across_matrix_group(_: Program, function: Function) -> Iterator[Edit]:
    """A reader or writer of asynchronous accumulators moves across WARPGROUP."""
    products = [i for i in function.instructions if i.base.endswith("GMMA")]
    owned = {r for i in products for r in i.defs if r < 256}
    for start, order in blocks(function):
        edits = _across(
            order,
            lambda i: i.base == "WARPGROUP",
            lambda i: bool(owned & {*i.defs, *i.uses}) and i.base not in BARRIERS,
        )
        for edit in edits:
            yield shift_edit(edit, start)


def _matrix_order(order: Order) -> Iterator[Edit]:
    """Warpgroup products and their WARPGROUP instructions are exchanged."""
    for at in range(len(order) - 1):
        first, second = order[at], order[at + 1]
        is_product = {first.base.endswith("GMMA"), second.base.endswith("GMMA")}
        is_group = all(i.base.endswith("GMMA") or i.base == "WARPGROUP" for i in (first, second))
        if is_group and True in is_product and first.payload != second.payload:
            yield Edit(move=(at, at + 1))


def _across_dummy_loads(order: Order) -> Iterator[Edit]:
    """An instruction moves between a run of ``@!PT LDS RZ, [RZ]`` and the instruction after it."""
    for at in range(len(order) - 1):
        load, after = order[at], order[at + 1]
        if load.never_executes and load.base == "LDS" and not after.never_executes:
            for k in (*range(at - 1, max(at - 6, -1), -1), *range(at + 2, at + 6)):
                if 0 <= k < len(order) and not order[k].never_executes and order[k].base in ALU:
                    yield Edit(move=(k, at) if k < at else (k, at + 1))


def _stores_swapped(order: Order) -> Iterator[Edit]:
    """Two stores to one memory space are exchanged; two threads may write the same address."""
    for at, first in enumerate(order):
        if first.base not in _LOADS_OF:
            continue
        for later in range(at + 1, min(at + 12, len(order))):
            second = order[later]
            if second.base == first.base and second.payload != first.payload:
                if not has_barrier(order, at, later) and may_both_execute(first, second):
                    yield Edit(move=(at, later))
                break


def _load_over_store(order: Order) -> Iterator[Edit]:
    """A load moves across a store to the same memory space."""
    for at, store in enumerate(order):
        loads = _LOADS_OF.get(store.base, ())
        for near in (range(at + 1, min(at + 16, len(order))), range(at - 1, max(at - 16, -1), -1)):
            for k in near:
                load = order[k]
                if load.base in loads and not load.never_executes:
                    is_free = not has_barrier(order, min(at, k), max(at, k))
                    if is_free and may_both_execute(store, load):
                        yield Edit(move=(k, at))
                    break


def _across_branch(_: Program, function: Function) -> Iterator[Edit]:
    """A store, or the writer of a loop-carried register, moves out of its block."""
    for block in function.blocks:
        order = function.instructions[block.start : block.end]
        last = block.end - 1
        if function.instructions[last].base not in ("BRA", "EXIT") or block.end >= len(
            function.instructions
        ):
            continue
        carried: set[int] = set()
        written: set[int] = set()
        for instruction in order:
            carried |= set(instruction.uses) - written
            written |= set(instruction.defs)
        is_loop = any(function.blocks[n].start == block.start for n in block.succ)
        for at in range(last - 1, max(last - 8, block.start - 1), -1):
            instruction = function.instructions[at]
            is_store = instruction.base in _LOADS_OF
            writes_carried = is_loop and carried & set(instruction.defs)
            if is_store or (writes_carried and unit_number(instruction) < 0):
                yield Edit(move=(at, last))
    for block in function.blocks[1:]:
        for at in range(block.start, min(block.start + 8, block.end)):
            before = function.instructions[block.start - 1]
            if function.instructions[at].base in _LOADS_OF and before.base in ("BRA", "EXIT"):
                yield Edit(move=(at, block.start - 1))


ORDERS = {
    "read before write": block_mutation(_raw_swap),
    "overwritten before read": block_mutation(_war_swap),
    "write behind the next write": block_mutation(_waw_swap),
    "access across a barrier": block_mutation(_across_barrier),
    "access across a fence": block_mutation(_across_fence),
    "access across an atomic": block_mutation(_across_atomic),
    "copy across its commit": block_mutation(_across_commit),
    "access across a counted wait": block_mutation(_across_counted_wait),
    "accumulator across WARPGROUP": mutation(_across_matrix_group),
    "warpgroup products reordered": block_mutation(_matrix_order),
    "instruction inside glue": block_mutation(_across_dummy_loads),
    "stores swapped": block_mutation(_stores_swapped),
    "load across a store": block_mutation(_load_over_store),
    "moved across a branch": mutation(_across_branch),
}
