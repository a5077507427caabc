"""Facts about one instruction for the in-flight analysis, computed once per function.

Sets of registers, scoreboards and predicate literals are bit masks.  A *literal* is a predicate or
its negation, such as ``P0`` or ``!P0``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nostall.sass.program import queues, registers
from nostall.sass.program.cover_rules import COVER, CoverTable, Proofs, group
from nostall.sass.program.instruction import Instruction

NEVER = 1 << 30
"""``max_latency`` of a variable-latency instruction: only a scoreboard proves it done."""


@dataclass(frozen=True, slots=True)
class InstructionFacts:
    """Reads and writes of one instruction, their times and their guard."""

    instruction: Instruction
    fixed_latency: bool
    defs: int
    """Registers that are written."""
    early_defs: int
    """The part of ``defs`` that has scoreboards of its own."""
    uses: int
    """Registers that are read."""
    late_sources: int
    """Registers that may still be read after issue."""
    kills: int
    """Registers that are written in all threads: ``defs`` without a guard, else none."""
    max_latency: int
    """Cycles after which a fixed-latency result has arrived; NEVER for variable latency."""
    group: str
    """Group in the in-order rules (:mod:`nostall.sass.program.cover_rules`), or ""."""
    proofs: Proofs
    """The groups of earlier instructions about which its scoreboards and its result prove
    something, by pairs with witnesses."""
    assumed: Proofs | None
    """The same by pairs without witnesses; None if there are none."""
    drains_sources: frozenset[str]
    """Groups of earlier instructions whose sources are read when it has issued."""
    assumed_drains: frozenset[str]
    """The same by pairs without witnesses."""
    result_scoreboards: int
    """Bit mask of the scoreboards that prove its own result written, without ``early_defs``."""
    early_scoreboards: int
    """Bit mask of the scoreboards that prove ``early_defs`` written."""
    completes_in_order: bool
    """Whether DEPBAR with a count proves it complete."""
    guard_literals: int
    """The literal of the guard, or 0."""
    redefined_literals: int
    """Literals of the predicates that are written, both signs."""
    accesses_memory: bool
    """Whether the instruction accesses or orders memory and is not a scheduling barrier."""
    completion: int
    """Bit mask of the write scoreboard, if no register of the result stands for it."""
    release: int
    """Bit mask of the read scoreboard, if no register of the sources stands for it."""


def instruction_facts(
    instruction: Instruction, sm: int, max_latency: int, cover: CoverTable = COVER
) -> InstructionFacts:
    """The facts of one instruction.

    ``max_latency``: cycles after which its result has arrived if it has fixed latency.
    ``cover``: the in-order rules to rely on.
    """
    has_fixed_latency = instruction.has_fixed_latency(sm)
    late_sources = register_mask(queues.late_sources(instruction, sm))
    accesses_memory = instruction.accesses_memory and not instruction.is_barrier
    completion, release = _announced(instruction, bool(late_sources))
    own_group = group(instruction, sm)
    result, early = queues.announced_results(instruction, cover)
    is_guarded = instruction.is_guarded
    proofs = cover.proofs(own_group, sm, witnessed=True, guarded=is_guarded)
    assumed = cover.proofs(own_group, sm, witnessed=False, guarded=is_guarded)
    return InstructionFacts(
        instruction=instruction,
        fixed_latency=has_fixed_latency,
        defs=register_mask(instruction.defs),
        early_defs=register_mask(early.registers) if early else 0,
        uses=register_mask(instruction.uses),
        late_sources=late_sources,
        kills=0 if instruction.is_guarded else register_mask(instruction.defs),
        max_latency=max_latency if has_fixed_latency else NEVER,
        group=own_group,
        proofs=proofs,
        assumed=assumed if any(assumed) else None,
        drains_sources=queues.drained_sources(instruction, sm, cover, witnessed=True),
        assumed_drains=queues.drained_sources(instruction, sm, cover, witnessed=False),
        result_scoreboards=result.scoreboards,
        early_scoreboards=early.scoreboards if early else 0,
        completes_in_order=own_group in proofs.in_order or own_group in assumed.in_order,
        guard_literals=guard_literal(instruction.guard) if instruction.guard else 0,
        redefined_literals=_redefined_literals(instruction),
        accesses_memory=accesses_memory,
        completion=completion,
        release=release,
    )


def _announced(instruction: Instruction, has_late_sources: bool) -> tuple[int, int]:
    """(``completion``, ``release``) of :class:`InstructionFacts`.

    Others may wait for any scoreboard of a scheduling barrier, whatever its registers.  A memory
    access announces its completion by its result and its source reads, if it has these.
    """
    control = instruction.control
    write = 1 << control.write_sb if control.write_sb < 6 else 0
    read = 1 << control.read_sb if control.read_sb < 6 else 0
    if instruction.is_barrier:
        return write, read
    if instruction.accesses_memory:
        return 0 if instruction.defs else write, 0 if has_late_sources else read
    return 0, 0


def register_mask(numbers: Sequence[int]) -> int:
    """Register numbers as a bit mask."""
    mask = 0
    for n in numbers:
        mask |= 1 << n
    return mask


def register_numbers(mask: int) -> list[int]:
    """The register numbers of a bit mask, in increasing order."""
    numbers: list[int] = []
    while mask:
        low = mask & -mask
        numbers.append(low.bit_length() - 1)
        mask ^= low
    return numbers


def guard_literal(guard: str) -> int:
    """The literal of a guard as a bit; 0 for PT and UPT.

    P0 to UP6 have bits 0 to 14, their negations bits 16 to 30.
    """
    is_negated = guard.startswith("!")
    name = guard.removeprefix("!")
    digit = name[-1]
    if not digit.isdigit():
        return 0
    return 1 << int(digit) + (8 if name.startswith("U") else 0) + (16 if is_negated else 0)


def negate_literals(literals: int) -> int:
    """The negation of each literal of a set."""
    return literals >> 16 | (literals & 0xFFFF) << 16


def _redefined_literals(instruction: Instruction) -> int:
    mask = 0
    for register in instruction.defs:
        if registers.is_predicate(register):
            bit = 1 << register - 384
            mask |= bit | bit << 16
    return mask


def drained_scoreboards(instruction: Instruction) -> int:
    """Bit mask of the scoreboards that a DEPBAR waits for until they are 0."""
    if instruction.base != "DEPBAR":
        return 0
    mask = 0
    operands = instruction.operands
    if operands and operands[0].startswith("SB"):
        scoreboard = int(operands[0][2:])
        count = operands[1] if len(operands) > 1 else "0x0"
        if not count.startswith("{") and int(count, 16) == 0:
            mask |= 1 << scoreboard
    for operand in operands:
        if operand.startswith("{"):
            for digit in operand.strip("{}").split(","):
                if digit.strip().isdigit():
                    mask |= 1 << int(digit)
    return mask
