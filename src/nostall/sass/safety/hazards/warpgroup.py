"""Asynchronous matrix products of a warpgroup: their registers are in use until the matching wait.

HGMMA and its relatives run after they issue.  Until they are complete, their accumulators may be
neither read nor written, and a matrix operand in registers may not be written (PTX ISA,
``wgmma.mma_async``; the registers of an operand are free after ``wgmma.wait_group``).  A product
with the operand ``gsb0`` commits a group of all products since the last commit.
``WARPGROUP.DEPBAR.LE gsb0, n`` waits until all groups but the last n are complete.  Products
execute in order, so one product may use the accumulators of an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nostall.sass.program import registers
from nostall.sass.program.blocks import Block
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Pipe

_MAX_COMMITS = 63
"""Commits after a product at which the count stops; a wait names fewer groups."""

State = dict[int, int]
"""Index of a product in flight -> commits at or after it, at least."""


@dataclass(frozen=True, slots=True)
class _Product:
    """Registers of one product."""

    instruction: Instruction
    accumulators: frozenset[int]
    operand: frozenset[int]
    """Registers of the matrix operand, if it is in registers."""


@dataclass(frozen=True, slots=True)
class EarlyAccess:
    """An access to a register that a product in flight still uses."""

    product: int
    """Index of the product."""
    instruction: int
    """Index of the instruction that accesses the register."""
    register: int
    is_operand: bool
    """Whether the register is of the product's matrix operand, and not an accumulator."""


def early_accesses(blocks: Sequence[Block], order: Sequence[Instruction]) -> set[EarlyAccess]:
    """All accesses of a function to registers of products that may be in flight."""
    products = {i.index: _product(i) for i in order if i.pipe is Pipe.GMMA}
    if not products:
        return set()
    states: list[State] = [{} for _ in blocks]
    worklist = list(range(len(blocks)))
    while worklist:
        number = worklist.pop()
        state = dict(states[number])
        for instruction in order[blocks[number].start : blocks[number].end]:
            _step(state, instruction)
        for successor in blocks[number].succ:
            worse = {k: n for k, n in state.items() if n < states[successor].get(k, n + 1)}
            if worse:
                states[successor].update(worse)
                worklist.append(successor)
    found: set[EarlyAccess] = set()
    for block, entry in zip(blocks, states, strict=True):
        state = dict(entry)
        for instruction in order[block.start : block.end]:
            found.update(_accesses(state, instruction, products))
            _step(state, instruction)
    return found


def _product(instruction: Instruction) -> _Product:
    general = [r for r in instruction.uses if not registers.is_uniform(r)]
    accumulators = frozenset(instruction.defs)
    operand = frozenset(r for r in general if not registers.is_predicate(r)) - accumulators
    return _Product(instruction, accumulators, operand)


def _step(state: State, instruction: Instruction) -> None:
    """Apply one instruction to the products in flight."""
    if instruction.pipe is Pipe.GMMA:
        state[instruction.index] = 0
        if "gsb0" in instruction.operands:
            for index, commits in state.items():
                state[index] = min(commits + 1, _MAX_COMMITS)
        return
    allowed = groups_in_flight(instruction)
    if allowed is not None:
        for index in [k for k, commits in state.items() if commits > allowed]:
            del state[index]


def groups_in_flight(instruction: Instruction) -> int | None:
    """n of ``WARPGROUP.DEPBAR.LE gsb0, n``; None for any other instruction."""
    if instruction.base != "WARPGROUP" or "DEPBAR" not in instruction.modifiers:
        return None
    return int(instruction.operands[1], 16)


def _accesses(
    state: State, instruction: Instruction, products: dict[int, _Product]
) -> Iterator[EarlyAccess]:
    """The accesses of one instruction to registers of products in flight."""
    if not state:
        return
    defs, uses = frozenset(instruction.defs), frozenset(instruction.uses)
    is_product = instruction.pipe is Pipe.GMMA
    for index in state:
        product = products[index]
        for register in product.operand & defs:
            yield EarlyAccess(index, instruction.index, register, True)
        touched = product.accumulators & (defs | uses)
        if is_product:
            touched &= uses - defs
        for register in touched:
            yield EarlyAccess(index, instruction.index, register, False)
