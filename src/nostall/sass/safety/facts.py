"""What the pending analysis needs to know about one instruction, computed once per function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nostall.sass.program import queues, registers
from nostall.sass.program.instruction import Instruction

NEVER = 1 << 30


@dataclass(frozen=True, slots=True)
class Facts:
    """Bit masks of registers and predicate literals; ``expires``: cycles after which a
    fixed-latency result has arrived (NEVER for variable latency)."""

    instruction: Instruction
    fixed: bool
    defs: int
    uses: int
    late: int
    kills: int
    expires: int
    result_queue: str
    source_queue: str
    when: int
    forgets: int


def register_mask(numbers: Sequence[int]) -> int:
    mask = 0
    for n in numbers:
        mask |= 1 << n
    return mask


def facts_of(instruction: Instruction, sm: int, ceiling: int) -> Facts:
    """Summarise one instruction; ``ceiling`` bounds a fixed-latency result in cycles."""
    return Facts(
        instruction=instruction,
        fixed=instruction.row.fixed(sm),
        defs=register_mask(instruction.defs),
        uses=register_mask(instruction.uses),
        late=register_mask(queues.late_sources(instruction, sm)),
        kills=0 if instruction.is_guarded else register_mask(instruction.defs),
        expires=ceiling if instruction.row.fixed(sm) else NEVER,
        result_queue=queues.result_queue(instruction, sm),
        source_queue=queues.source_queue(instruction, sm),
        when=literal(instruction.guard) if instruction.guard else 0,
        forgets=_forgets(instruction),
    )


def literal(guard: str) -> int:
    """A predicate literal as a bit: P0..UP6 take bits 0..14, their negations bits 16..30."""
    negated = guard.startswith("!")
    name = guard.removeprefix("!")
    digit = name[-1]
    if not digit.isdigit():
        return 0
    return 1 << int(digit) + (8 if name.startswith("U") else 0) + (16 if negated else 0)


def opposite(literals: int) -> int:
    """The negation of each literal in the set."""
    return literals >> 16 | (literals & 0xFFFF) << 16


def _forgets(instruction: Instruction) -> int:
    """The literals of the predicates that the instruction redefines."""
    mask = 0
    for register in instruction.defs:
        if registers.is_predicate(register):
            bit = 1 << register - 384
            mask |= bit | bit << 16
    return mask


def depbar_mask(instruction: Instruction) -> int:
    """Scoreboards that a DEPBAR fully drains."""
    if instruction.base != "DEPBAR":
        return 0
    mask = 0
    operands = instruction.operands
    if operands and operands[0].startswith("SB"):
        board = int(operands[0][2:])
        count = operands[1] if len(operands) > 1 else "0x0"
        if not count.startswith("{") and int(count, 16) == 0:
            mask |= 1 << board
    for operand in operands:
        if operand.startswith("{"):
            for digit in operand.strip("{}").split(","):
                if digit.strip().isdigit():
                    mask |= 1 << int(digit)
    return mask


def registers_in(mask: int) -> list[int]:
    """The register numbers of a bit mask."""
    found: list[int] = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
