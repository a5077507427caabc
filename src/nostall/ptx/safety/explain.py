"""Findings about a block: which instruction differs, and in what.

| kind | the candidate |
|---|---|
| ``layout`` | has other labels, braces, declarations or directives in a block |
| ``foreign-instruction`` | has an instruction that the function does not have |
| ``other-block`` | has an instruction of another block |
| ``lost-instruction`` | lacks an instruction |
| ``repeated-instruction`` | has an instruction more often |
| ``operand-value`` | reads a register before or after another write than the original |
| ``carry-order`` | reads another carry flag |
| ``asynchronous-operand`` | accesses an operand of wgmma or tcgen05 at another side of a wait |
| ``convergence`` | orders an operation of a warp and a barrier differently |
| ``memory-order`` | orders accesses of a memory space differently |
| ``effect-order`` | orders effects differently |
| ``final-value`` | leaves another value at the end of the block |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nostall.ptx.safety.execution import Execution, Machine
from nostall.ptx.safety.reading import pseudo_registers as state
from nostall.ptx.safety.reading.blocks import Block
from nostall.ptx.safety.reading.instruction import FOREIGN
from nostall.ptx.safety.reading.lexical import line_of, normalise
from nostall.ptx.safety.reading.scope import Registers
from nostall.ptx.safety.verdict import Finding

_STATE_RULES: dict[int, tuple[str, str]] = {
    state.ASYNCHRONOUS: (
        "asynchronous-operand",
        "it accesses an operand of wgmma or tcgen05, so the fences, commits and waits before it "
        "must be the original's",
    ),
    state.CARRY: ("carry-order", "it must read the carry flag of the original's instruction"),
    state.EXCHANGES: (
        "convergence",
        "the operations of a warp and the barriers before it must be the original's",
    ),
    state.BARRIERS: ("convergence", "the barriers before it must be the original's"),
    state.EFFECTS: ("effect-order", "the effects before it must be the original's, in order"),
    state.GLOBAL: ("memory-order", "the stores and effects on global memory before it differ"),
    state.SHARED: ("memory-order", "the stores and effects on shared memory before it differ"),
    state.LOCAL: ("memory-order", "the stores and effects on local memory before it differ"),
    state.PARAMETERS: ("memory-order", "the stores of call parameters before it differ"),
    state.READ_ONLY: ("memory-order", "it must not cross griddepcontrol or a call"),
}
"""Pseudo register -> kind of a difference in it, and the requirement; the first one counts."""


@dataclass(frozen=True, slots=True)
class BlockPair:
    """A block of the candidate and its counterpart."""

    original: Block
    execution: Execution
    candidate: Block
    function: str
    text: str
    """The candidate's text, without comments."""

    def finding(self, kind: str, position: int, reason: str) -> Finding:
        """A finding about the instruction at a position of the candidate's block."""
        offsets = self.candidate.offsets
        offset = offsets[position] if position < len(offsets) else self.candidate.start
        return Finding(kind, self.function, line_of(self.text, offset), self.at(offset), reason)

    def at(self, offset: int) -> str:
        """The statement at an offset of the candidate."""
        end = self.text.find(";", offset)
        return normalise(self.text[offset : end + 1 if end >= 0 else None])


def layout_finding(pair: BlockPair) -> Finding:
    """The first difference between the layouts of two blocks."""
    old, new = pair.original.layout, pair.candidate.layout
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), None)
    if at is None:
        at = min(len(old), len(new))
    expected, found = (part[at] if at < len(part) else "nothing" for part in (old, new))
    reason = (
        f"the block has {found} where the original has {expected}; labels, braces, declarations "
        "and directives must be equal in each block"
    )
    return Finding("layout", pair.function, line_of(pair.text, pair.candidate.start), found, reason)


def content_finding(pair: BlockPair, all_numbers: frozenset[int]) -> Finding:
    """Why two blocks do not have the same instructions."""
    numbers = [i.number for i in pair.candidate.instructions]
    expected = Counter(pair.execution.instructions)
    found = Counter(numbers)
    added = found - expected
    for position, number in enumerate(numbers):
        if number in added and number not in expected:
            if number == FOREIGN or number not in all_numbers:
                reason = "the original's function has no such instruction"
                return pair.finding("foreign-instruction", position, reason)
            reason = "the original has this instruction in another block; blocks must keep theirs"
            return pair.finding("other-block", position, reason)
    if added:
        position = max(i for i, n in enumerate(numbers) if n in added)
        reason = "the original's block has this instruction less often"
        return pair.finding("repeated-instruction", position, reason)
    lost = next(iter(expected - found))
    instruction = next(i for i in pair.original.instructions if i.number == lost)
    reason = f"the block lacks an instruction of the original: {instruction.opcode}"
    return pair.finding("lost-instruction", 0, reason)


def value_finding(
    pair: BlockPair, position: int, machine: Machine, registers: Registers
) -> Finding:
    """Why an instruction reads other values; see :meth:`Machine.follow` for ``position``."""
    instructions = pair.candidate.instructions
    values = machine.values_before(instructions, position, pair.execution)
    if position == len(instructions):
        return _final_finding(pair, values, registers)
    number = instructions[position].number
    evaluation = machine.evaluation(number, values)
    differing = _differing_reads(evaluation, pair.execution, machine.reads[number])
    named = [r for r in differing if r >= state.COUNT]
    if named:
        names = ", ".join(registers.name(r) for r in named[:4])
        reason = f"{names} has another value here than in the original"
        return pair.finding("operand-value", position, reason)
    for register, (kind, reason) in _STATE_RULES.items():
        if register in differing:
            return pair.finding(kind, position, reason)
    reason = "the original executes this instruction with these values less often"
    return pair.finding("repeated-instruction", position, reason)


def _differing_reads(
    evaluation: Sequence[int], execution: Execution, reads: tuple[int, ...]
) -> list[int]:
    """Registers whose value differs from the most similar evaluation of the original."""
    best: list[int] | None = None
    for known in execution.numbers:
        if known[0] == evaluation[0]:
            pairs = zip(known[1:], evaluation[1:], reads, strict=True)
            differing = [register for old, new, register in pairs if old != new]
            if best is None or len(differing) < len(best):
                best = differing
    return best or []


def _final_finding(pair: BlockPair, values: dict[int, int], registers: Registers) -> Finding:
    last = max(len(pair.candidate.instructions) - 1, 0)
    final = pair.execution.final
    differing = [r for r, value in values.items() if final.get(r) != value]
    named = [r for r in differing if r >= state.COUNT]
    for register, (kind, reason) in _STATE_RULES.items():
        if register in differing and not named:
            return pair.finding(kind, last, f"at the end of the block: {reason}")
    names = ", ".join(registers.name(r) for r in named[:4]) or "a register"
    reason = f"the block ends with another value in {names} than the original"
    return pair.finding("final-value", last, reason)
