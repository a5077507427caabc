"""Violations of order: instructions that pass what they must not pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from nostall.sass.program import Function, Instruction, Program
from tests.mutations.edits import (
    ACCESSES,
    ALU,
    FENCES,
    Edit,
    blocks,
    fenced,
    in_blocks,
    mutation,
    shifted,
    together,
    unit,
)

Order = Sequence[Instruction]
_LOADS_OF = {"STG": ("LDG",), "STS": ("LDS", "LDSM"), "STL": ("LDL",)}
_ATOMICS = ("ATOM", "ATOMG", "ATOMS", "RED", "REDG")


def _neighbours(order: Order) -> Iterator[tuple[int, Instruction, Instruction]]:
    for at in range(len(order) - 1):
        first, second = order[at], order[at + 1]
        if fenced(order, at, at + 1) or first.payload == second.payload:
            continue
        if together(first, second):
            yield at, first, second


def _raw_swap(order: Order) -> Iterator[Edit]:
    """A reader moved in front of the writer of what it reads."""
    for at, first, second in _neighbours(order):
        if set(first.defs) & set(second.uses):
            yield Edit(move=(at, at + 1))


def _war_swap(order: Order) -> Iterator[Edit]:
    """A writer moved in front of the last reader of the old value."""
    for at, first, second in _neighbours(order):
        if set(first.uses) & set(second.defs) and not set(first.defs) & set(second.uses):
            yield Edit(move=(at, at + 1))


def _waw_swap(order: Order) -> Iterator[Edit]:
    """A writer moved behind the next writer of its register, whose value is then lost."""
    for at, first in enumerate(order):
        if not first.defs or first.is_guarded or first.base in FENCES:
            continue
        for later in range(at + 1, min(at + 24, len(order))):
            both = set(first.defs) & set(order[later].defs)
            if both:
                if not fenced(order, at, later) and _read_after(order, later, both):
                    yield Edit(move=(at, later))
                break


def _read_after(order: Order, at: int, registers: set[int]) -> bool:
    for instruction in order[at + 1 :]:
        if registers & set(instruction.uses):
            return not instruction.is_guarded
        if registers & set(instruction.defs):
            return False
    return False


def _across(
    order: Order, is_fence: Callable[[Instruction], bool], mover: Callable[[Instruction], bool]
) -> Iterator[Edit]:
    """The nearest movers on both sides of a fence, moved to its other side."""
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
    return instruction.base in ACCESSES and not instruction.never_executes


def _across_barrier(order: Order) -> Iterator[Edit]:
    """A memory access moved across a barrier of the thread block."""
    yield from _across(order, lambda i: i.base == "BAR", _is_access)


def _across_fence(order: Order) -> Iterator[Edit]:
    """A memory access moved across a memory barrier or cache control."""
    fences = ("MEMBAR", "ERRBAR", "CCTL", "FENCE")
    yield from _across(order, lambda i: i.base in fences, _is_access)


def _across_atomic(order: Order) -> Iterator[Edit]:
    """A memory access moved across an atomic operation or a strong access."""

    def is_fence(instruction: Instruction) -> bool:
        strong = _is_access(instruction) and "STRONG" in instruction.modifiers
        return instruction.base in _ATOMICS or strong

    yield from _across(order, is_fence, _is_access)


def _across_commit(order: Order) -> Iterator[Edit]:
    """An asynchronous copy moved into another group."""
    yield from _across(order, lambda i: i.base == "LDGDEPBAR", lambda i: i.base == "LDGSTS")


def _across_counted_wait(order: Order) -> Iterator[Edit]:
    """An access moved across DEPBAR, which waits for all groups but the last few."""
    yield from _across(order, lambda i: i.base == "DEPBAR", _is_access)


def _across_matrix_group(_: Program, function: Function) -> Iterator[Edit]:
    """A reader or writer of asynchronous accumulators moved across WARPGROUP."""
    products = [i for i in function.instructions if i.base.endswith("GMMA")]
    owned = {r for i in products for r in i.defs if r < 256}
    for start, order in blocks(function):
        found = _across(
            order,
            lambda i: i.base == "WARPGROUP",
            lambda i: bool(owned & {*i.defs, *i.uses}) and i.base not in FENCES,
        )
        for edit in found:
            yield shifted(edit, start)


def _matrix_order(order: Order) -> Iterator[Edit]:
    """Warpgroup products and their WARPGROUP instructions in another order."""
    for at in range(len(order) - 1):
        first, second = order[at], order[at + 1]
        kinds = {first.base.endswith("GMMA"), second.base.endswith("GMMA")}
        known = all(i.base.endswith("GMMA") or i.base == "WARPGROUP" for i in (first, second))
        if known and True in kinds and first.payload != second.payload:
            yield Edit(move=(at, at + 1))


def _across_glue(order: Order) -> Iterator[Edit]:
    """An instruction put between a run of ``@!PT LDS RZ, [RZ]`` and what the run belongs to."""
    for at in range(len(order) - 1):
        here, after = order[at], order[at + 1]
        if here.never_executes and here.base == "LDS" and not after.never_executes:
            for k in (*range(at - 1, max(at - 6, -1), -1), *range(at + 2, at + 6)):
                if 0 <= k < len(order) and not order[k].never_executes and order[k].base in ALU:
                    yield Edit(move=(k, at) if k < at else (k, at + 1))


def _stores_swapped(order: Order) -> Iterator[Edit]:
    """Two stores of one space in another order: some thread pair may write one address."""
    for at, first in enumerate(order):
        if first.base not in _LOADS_OF:
            continue
        for later in range(at + 1, min(at + 12, len(order))):
            second = order[later]
            if second.base == first.base and second.payload != first.payload:
                if not fenced(order, at, later) and together(first, second):
                    yield Edit(move=(at, later))
                break


def _load_over_store(order: Order) -> Iterator[Edit]:
    """A load moved across a store of the same space."""
    for at, store in enumerate(order):
        loads = _LOADS_OF.get(store.base, ())
        for near in (range(at + 1, min(at + 16, len(order))), range(at - 1, max(at - 16, -1), -1)):
            for k in near:
                load = order[k]
                if load.base in loads and not load.never_executes:
                    if not fenced(order, min(at, k), max(at, k)) and together(store, load):
                        yield Edit(move=(k, at))
                    break


def _across_branch(_: Program, function: Function) -> Iterator[Edit]:
    """A store, or what a loop carries on, moved out of its block."""
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
        loops = any(function.blocks[n].start == block.start for n in block.succ)
        for at in range(last - 1, max(last - 8, block.start - 1), -1):
            instruction = function.instructions[at]
            stored = instruction.base in _LOADS_OF
            if stored or (loops and carried & set(instruction.defs) and unit(instruction) < 0):
                yield Edit(move=(at, last))
    for block in function.blocks[1:]:
        for at in range(block.start, min(block.start + 8, block.end)):
            before = function.instructions[block.start - 1]
            if function.instructions[at].base in _LOADS_OF and before.base in ("BRA", "EXIT"):
                yield Edit(move=(at, block.start - 1))


ORDERS = {
    "read before write": in_blocks(_raw_swap),
    "overwritten before read": in_blocks(_war_swap),
    "write behind the next write": in_blocks(_waw_swap),
    "access across a barrier": in_blocks(_across_barrier),
    "access across a fence": in_blocks(_across_fence),
    "access across an atomic": in_blocks(_across_atomic),
    "copy across its commit": in_blocks(_across_commit),
    "access across a counted wait": in_blocks(_across_counted_wait),
    "accumulator across WARPGROUP": mutation(_across_matrix_group),
    "warpgroup products reordered": in_blocks(_matrix_order),
    "instruction inside glue": in_blocks(_across_glue),
    "stores swapped": in_blocks(_stores_swapped),
    "load across a store": in_blocks(_load_over_store),
    "moved across a branch": mutation(_across_branch),
}
