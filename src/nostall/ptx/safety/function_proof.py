"""Proof of one function: the original is executed once, then candidates are compared with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from nostall.ptx.safety.dependent_launch import find_inserted
from nostall.ptx.safety.execution import Machine
from nostall.ptx.safety.explain import BlockPair, content_finding, layout_finding, value_finding
from nostall.ptx.safety.reading import pseudo_registers
from nostall.ptx.safety.reading.blocks import Block, cut_blocks, jump_targets
from nostall.ptx.safety.reading.compound import Compound
from nostall.ptx.safety.reading.declarations import Header, read_header
from nostall.ptx.safety.reading.function import FunctionReader
from nostall.ptx.safety.reading.instruction import Instruction
from nostall.ptx.safety.reading.lexical import ModuleItem, line_of
from nostall.ptx.safety.reading.scope import Scope
from nostall.ptx.safety.verdict import Finding


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
