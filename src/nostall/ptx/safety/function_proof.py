"""Proof of one function: the original is executed once, then candidates are compared with it.

Findings about a block: which instruction differs, and in what.

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

Inserted instructions for programmatic dependent launch, and when they are safe.

With its launch attribute a kernel may start before the kernels before it end, and sees their
results after ``griddepcontrol.wait`` only; without the attribute the wait does nothing (PTX ISA,
griddepcontrol).  The wait is safe in the first block of a kernel, which all paths pass, if nothing
before it touches memory.  ``griddepcontrol.launch_dependents`` lets dependents start early, even
before the wait; that is safe if each of them waits, which the texts do not tell: the caller states
it.

Symbolic execution of a block with uninterpreted functions and hash-consed terms.

The value of a register is a number: that of the evaluation that wrote it and its position among the
results, or one of its own for the value at the start of the block.  An evaluation is an instruction
with the values that it reads, and equal evaluations have equal numbers.  Pseudo registers hold
memory, effects and convergence, so that they are compared as registers are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nostall.ptx.safety.reading import pseudo_registers
from nostall.ptx.safety.reading import pseudo_registers as state
from nostall.ptx.safety.reading.blocks import (
    Block,
    Compound,
    FunctionReader,
    cut_blocks,
    jump_targets,
)
from nostall.ptx.safety.reading.declarations import Header, read_header
from nostall.ptx.safety.reading.instruction import FOREIGN, Instruction
from nostall.ptx.safety.reading.lexical import ModuleItem, line_of, normalise
from nostall.ptx.safety.reading.scope import Registers, Scope
from nostall.ptx.safety.verdict import Finding

_MAX_RESULTS = 1 << 12
"""More than an instruction writes: 256 registers and the pseudo registers."""

Evaluation = tuple[int, ...]
"""The number of an instruction, then the value of each register that it reads."""


@dataclass(slots=True)
class Execution:
    """The execution of one block of the original."""

    initial: dict[int, int]
    """Register -> value at the start of the block, of the registers that the block touches."""
    numbers: dict[Evaluation, int] = field(default_factory=dict[Evaluation, int])
    """Each evaluation of the block -> its number."""
    order: list[int] = field(default_factory=list[int])
    """Numbers of the evaluations, sorted."""
    final: dict[int, int] = field(default_factory=dict[int, int])
    """Register -> value at the end of the block."""
    instructions: list[int] = field(default_factory=list[int])
    """Numbers of the block's instructions, sorted."""


class Machine:
    """Executes blocks of one function; ``reads`` and ``writes`` are by instruction number."""

    def __init__(
        self, reads: Mapping[int, tuple[int, ...]], writes: Mapping[int, tuple[int, ...]]
    ) -> None:
        self.reads = reads
        self.writes = writes

    def execute(self, instructions: Sequence[Instruction]) -> Execution:
        """Execute a block of the original."""
        used = [i.number for i in instructions]
        touched = {r for n in used for r in (*self.reads[n], *self.writes[n])}
        # Values of evaluations are not negative.
        execution = Execution({register: -1 - register for register in touched})
        values, numbers = dict(execution.initial), execution.numbers
        for which in used:
            number = numbers.setdefault(self.evaluation(which, values), len(numbers))
            self._write(which, number, values)
            execution.order.append(number)
        execution.order.sort()
        execution.final = values
        execution.instructions = sorted(used)
        return execution

    def follow(self, instructions: Sequence[Instruction], original: Execution) -> int | None:
        """Execute a block of a candidate beside the original's.

        Returns None if the block computes the same, the position of the first instruction that
        reads other values than in the original, or the number of instructions if the values at the
        end differ.  The block must have the original's instructions.
        """
        values = dict(original.initial)
        value_of = values.__getitem__
        number_of = original.numbers.get
        all_reads, all_writes = self.reads, self.writes
        order: list[int] = []
        for position, instruction in enumerate(instructions):
            which = instruction.number
            number = number_of((which, *map(value_of, all_reads[which])))
            if number is None:
                return position
            value = number * _MAX_RESULTS
            for register in all_writes[which]:
                values[register] = value
                value += 1
            order.append(number)
        order.sort()
        is_equal = order == original.order and values == original.final
        return None if is_equal else len(instructions)

    def evaluation(self, which: int, values: Mapping[int, int]) -> Evaluation:
        """The evaluation of instruction number ``which`` with these values."""
        return (which, *[values[r] for r in self.reads[which]])

    def values_before(
        self, instructions: Sequence[Instruction], position: int, original: Execution
    ) -> dict[int, int]:
        """Values before an instruction of a candidate; all before it read the original's values."""
        values = dict(original.initial)
        for instruction in instructions[:position]:
            number = original.numbers[self.evaluation(instruction.number, values)]
            self._write(instruction.number, number, values)
        return values

    def _write(self, which: int, number: int, values: dict[int, int]) -> None:
        for position, register in enumerate(self.writes[which]):
            values[register] = number * _MAX_RESULTS + position


_STATE_RULES: dict[int, tuple[str, str]] = {
    state.ASYNCHRONOUS: (
        "asynchronous-operand",
        "it accesses an operand of wgmma or tcgen05, so the fences, commits and waits before it "
        "must be the original's",
    ),
    state.CARRY: ("carry-order", "it must read the carry flag of the original's instruction"),
    state.EFFECTS: ("effect-order", "the effects before it must be the original's, in order"),
    state.EXCHANGES: (
        "convergence",
        "the operations of a warp, the barriers, and what threads may wait for before it must "
        "be the original's",
    ),
    state.BARRIERS: ("convergence", "the barriers before it must be the original's"),
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


WAIT, TRIGGER = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
_HARMLESS = frozenset({state.CARRY, state.EXCHANGES, state.BARRIERS})
"""State that an instruction before the wait may touch."""


@dataclass(frozen=True, slots=True)
class Inserted:
    """The inserted instructions of a candidate's kernel, as (block, position) in it."""

    blocks: list[Block]
    """The blocks without the inserted instructions."""
    waits: list[tuple[int, int]]
    triggers: list[tuple[int, int]]

    def problem(
        self, blocks: Sequence[Block], dependents_wait: bool
    ) -> tuple[int, int, str] | None:
        """(block, position, reason) of what is not safe in ``blocks``, the candidate's."""
        requirement = "the wait must stand once, in the first block, before all accesses of memory"
        if not self.waits:
            return (*self.triggers[0], f"dependents start early, but nothing waits; {requirement}")
        if len(self.waits) > 1 or self.waits[0][0] != 0:
            return (*self.waits[-1], f"the wait is not on every path; {requirement}")
        if self.triggers and not dependents_wait:
            reason = "dependents start early, and may not wait; state that each of them waits"
            return (*self.triggers[0], reason)
        end = self.waits[0][1]
        for position, instruction in enumerate(blocks[0].instructions[:end]):
            if (0, position) not in self.triggers and _touches_memory(instruction):
                return 0, position, f"it may access memory before the wait; {requirement}"
        return None

    def differences(self, kernel: str) -> tuple[str, ...]:
        """What the candidate does more than the original, one sentence each."""
        found = [f"kernel {kernel} waits for the kernels before it ({WAIT})"]
        if self.triggers:
            found.append(
                f"kernel {kernel} lets its dependents start early ({TRIGGER}); each must wait"
            )
        return tuple(found)


def find_inserted(blocks: Sequence[Block]) -> Inserted | None:
    """The unguarded griddepcontrol instructions of a kernel; None if there are none."""
    found = Inserted([], [], [])
    for number, block in enumerate(blocks):
        kept: list[int] = []
        for position, instruction in enumerate(block.instructions):
            is_guarded = any(r >= state.COUNT for r in instruction.reads)
            if instruction.opcode == WAIT and not is_guarded:
                found.waits.append((number, position))
            elif instruction.opcode == TRIGGER and not is_guarded:
                found.triggers.append((number, position))
            else:
                kept.append(position)
        found.blocks.append(
            replace(
                block,
                instructions=[block.instructions[at] for at in kept],
                offsets=[block.offsets[at] for at in kept],
            )
        )
    return found if found.waits or found.triggers else None


def _touches_memory(instruction: Instruction) -> bool:
    return any(
        r < state.COUNT and r not in _HARMLESS for r in (*instruction.reads, *instruction.writes)
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the comparison of one function found."""

    findings: list[Finding]
    differences: tuple[str, ...]
    checked: int


class FunctionProof:
    """One function of the original, executed symbolically."""

    def __init__(self, item: ModuleItem, module: Scope) -> None:
        self.item = item
        self.header: Header = read_header(item)
        self._reader = FunctionReader(module, self.header.parameters, item)
        placed = self._reader.place(item)
        self._targets = jump_targets(placed)
        self.blocks = cut_blocks(placed, self._targets, item.offset)
        compounds = self._reader.compounds
        parts = [self.blocks, *(c.blocks for c in compounds)]
        self._machine = _machine([i for blocks in parts for b in blocks for i in b.instructions])
        self._executions = [self._machine.execute(b.instructions) for b in self.blocks]
        self._compound_executions = {
            c.instruction.number: [self._machine.execute(b.instructions) for b in c.blocks]
            for c in compounds
        }
        self._reader.freeze(self._is_equal)
        self._hints = _count_hints(self.blocks)
        self._all_numbers = frozenset(i.number for b in self.blocks for i in b.instructions)

    def compare(
        self, item: ModuleItem, text: str, may_insert: bool, dependents_wait: bool
    ) -> Comparison:
        """Compare a candidate's version of the function; ``text`` is the candidate's.

        ``may_insert``: whether the candidate may have a wait for the kernels before it that the
        original lacks; see :mod:`.dependent_launch`.  ``dependents_wait``: whether each kernel
        that is launched as a dependent of this one waits for it.
        """
        blocks = cut_blocks(self._reader.place(item), self._targets, item.offset)
        differences: tuple[str, ...] = ()
        findings: list[Finding] = []
        inserted = find_inserted(blocks) if may_insert and "griddepcontrol" in text else None
        if inserted is not None:
            if problem := inserted.problem(blocks, dependents_wait):
                number, position, reason = problem
                pair = self._pair(number, blocks[number], text)
                findings.append(pair.finding("dependent-launch", position, reason))
            blocks = inserted.blocks
            differences = inserted.differences(self.header.name)
        findings += self._block_findings(blocks, item, text)
        differences += self._hint_differences(blocks)
        checked = sum(len(block.instructions) for block in blocks)
        return Comparison(findings, () if findings else differences, checked)

    def _block_findings(self, blocks: list[Block], item: ModuleItem, text: str) -> list[Finding]:
        """The first difference of each block."""
        findings: list[Finding] = []
        for number, block in enumerate(blocks[: len(self.blocks)]):
            finding = self._compare_blocks(self._pair(number, block, text))
            if finding is not None:
                findings.append(finding)
        if len(blocks) != len(self.blocks) and not findings:
            line = line_of(text, item.offset)
            reason = f"the function has {len(blocks)} blocks; the original has {len(self.blocks)}"
            findings.append(Finding("layout", self.header.name, line, "", reason))
        return findings

    def _pair(self, number: int, block: Block, text: str) -> BlockPair:
        at = min(number, len(self.blocks) - 1)
        return BlockPair(self.blocks[at], self._executions[at], block, self.header.name, text)

    def _compare_blocks(self, pair: BlockPair) -> Finding | None:
        if pair.original.layout != pair.candidate.layout:
            return layout_finding(pair)
        instructions, execution = pair.candidate.instructions, pair.execution
        if sorted(i.number for i in instructions) != execution.instructions:
            return content_finding(pair, self._all_numbers)
        position = self._machine.follow(instructions, execution)
        if position is None:
            return None
        return value_finding(pair, position, self._machine, self._reader.registers)

    def _is_equal(self, compound: Compound, blocks: Sequence[Block]) -> bool:
        """Whether blocks with the signature of a compound statement compute the same."""
        executions = self._compound_executions[compound.instruction.number]
        return all(
            self._machine.follow(block.instructions, execution) is None
            for block, execution in zip(blocks, executions, strict=True)
        )

    def _hint_differences(self, blocks: list[Block]) -> tuple[str, ...]:
        hints = _count_hints(blocks)
        if hints == self._hints:
            return ()
        changed = max((hints - self._hints).total(), (self._hints - hints).total())
        return (f"{self.header.name} has other cache hints at {changed} loads and stores",)

    def leaves(self) -> Iterator[Instruction]:
        """All instructions, those of compound statements instead of these."""
        return _leaves(i for block in self.blocks for i in block.instructions)


def _leaves(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    for instruction in instructions:
        if instruction.inner:
            yield from _leaves(instruction.inner)
        else:
            yield instruction


def _count_hints(blocks: Iterable[Block]) -> Counter[tuple[int, str]]:
    """(number of an instruction, its hints) -> how often, of instructions with hints."""
    leaves = _leaves(i for block in blocks for i in block.instructions)
    return Counter((i.number, i.hints) for i in leaves if i.hints)


def _with_copies(instructions: list[Instruction]) -> frozenset[int]:
    """Registers of asynchronous operands, and those that a ``mov`` copies them to, transitively.

    A compiler may copy an accumulator before its wait and use the copy after it; ptxas then keeps
    both in one register.
    """
    found = frozenset[int]().union(*(i.in_flight for i in instructions))
    copies = [i for i in instructions if i.opcode.partition(".")[0] == "mov"] if found else []
    while True:
        new = found.union(*(i.writes for i in copies if not found.isdisjoint(i.reads)))
        if new == found:
            return found
        found = new


def _machine(instructions: list[Instruction]) -> Machine:
    """The machine for a function: accesses of asynchronous operands read their state as well."""
    in_flight = _with_copies(instructions)
    reads: dict[int, tuple[int, ...]] = {}
    writes: dict[int, tuple[int, ...]] = {}
    for instruction in instructions:
        known = instruction.reads
        is_access = not in_flight.isdisjoint((*instruction.reads, *instruction.writes))
        if is_access and pseudo_registers.ASYNCHRONOUS not in known:
            known = (*known, pseudo_registers.ASYNCHRONOUS)
        reads[instruction.number] = known
        writes[instruction.number] = instruction.writes
    return Machine(reads, writes)
