"""Basic blocks and the control-flow graph of one function.

The graph over-approximates where control can go.  A superfluous edge makes nostall more careful; a
missing edge would make it wrong.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Effect, Pipe

_LABEL_OPERAND = re.compile(r"`\((.+?)\)")
_BRANCH_TARGETS = re.compile(r'"BRANCH_TARGETS ([^"]*)"')
"""nvdisasm's remark on an indirect branch: the targets that the cubin records for this branch."""
_NO_FALL_THROUGH = frozenset(
    ("BRA", "JMP", "EXIT", "RET", "BRX", "BRXU", "JMX", "JMXU", "KILL", "LONGJMP")
)
_INDIRECT_BRANCHES = frozenset(("BRX", "BRXU", "JMX", "JMXU"))


@dataclass(frozen=True, slots=True)
class Block:
    """One basic block: the instructions at positions ``start`` to ``end - 1``."""

    start: int
    end: int
    succ: tuple[int, ...]
    """Numbers of the blocks that may run next."""
    pred: tuple[int, ...]
    """Numbers of the blocks that may run before."""
    is_entry: bool
    """Whether control can enter here from outside the function (a symbol names the position)."""
    subroutine: int
    """Number of the subroutine of this text section that contains the block."""
    adjoins_unknown_code: bool
    """Whether code that is not in this graph may run immediately before or after the block."""

    def __len__(self) -> int:
        return self.end - self.start


def build_blocks(
    instructions: Sequence[Instruction],
    labels: Mapping[str, int],
    entries: Sequence[int],
    indirect_targets: Sequence[int],
    is_kernel: bool,
) -> tuple[Block, ...]:
    """Cut a function into basic blocks and connect them.

    ``labels`` maps each label to its position.  ``entries`` are the positions of function symbols.
    ``indirect_targets`` are positions that an indirect branch may reach.  ``is_kernel``: a launch
    starts at position 0; otherwise unknown callers may call it.
    """
    graph = _GraphBuilder(instructions, labels, entries, indirect_targets)
    succ = graph.successors()
    pred: list[list[int]] = [[] for _ in graph.starts]
    for i, successors in enumerate(succ):
        for j in successors:
            pred[j].append(i)
    entry_blocks = {graph.number[e] for e in (0, *entries) if e in graph.number}
    adjoins_unknown_code = graph.adjoins_unknown_code(is_kernel)
    return tuple(
        Block(
            start,
            graph.ends[i],
            succ[i],
            tuple(pred[i]),
            i in entry_blocks,
            graph.subroutine(start),
            adjoins_unknown_code[i],
        )
        for i, start in enumerate(graph.starts)
    )


class _GraphBuilder:
    """Block boundaries of one function, and the edges between its blocks."""

    def __init__(
        self,
        instructions: Sequence[Instruction],
        labels: Mapping[str, int],
        entries: Sequence[int],
        indirect_targets: Sequence[int],
    ) -> None:
        self.instructions = instructions
        self.indirect_targets = indirect_targets
        # Position of a branch or call -> the positions that it may jump to.
        self.targets = {
            at: targets for at, i in enumerate(instructions) if (targets := _targets(i, labels))
        }
        self.resume = _resume_positions(instructions, labels)
        called = {
            target
            for at, targets in self.targets.items()
            if _is_call(instructions[at])
            for target in targets
        }
        self.subroutine_starts = sorted({0, *entries, *called})
        count = len(instructions)
        leaders = {0, *entries, *indirect_targets, *called}.union(*self.targets.values())
        leaders.update(at + 1 for at, i in enumerate(instructions) if i.effects & Effect.ENDS_BLOCK)
        leaders.update(*self.resume.values())
        self.starts = sorted(position for position in leaders if 0 <= position < count)
        self.ends = [*self.starts[1:], count]
        self.number = {start: i for i, start in enumerate(self.starts)}
        self.labelled_blocks = self._block_numbers({*indirect_targets, *labels.values()})
        self.return_blocks = self._find_return_blocks()

    def subroutine(self, position: int) -> int:
        """Number of the subroutine that contains ``position``."""
        return bisect_right(self.subroutine_starts, position) - 1

    def _block_numbers(self, positions: set[int]) -> list[int]:
        """The blocks that start at one of ``positions``."""
        return [self.number[position] for position in positions if position in self.number]

    def _find_return_blocks(self) -> dict[int, set[int]]:
        """Subroutine -> the blocks after its calls, to which its RET may return."""
        blocks: dict[int, set[int]] = {}
        for end in self.ends:
            if _is_call(self.instructions[end - 1]) and end < len(self.instructions):
                for target in self.targets.get(end - 1, ()):
                    blocks.setdefault(self.subroutine(target), set()).add(self.number[end])
        return blocks

    def successors(self) -> list[tuple[int, ...]]:
        """For each block the numbers of the blocks that may run next, sorted."""
        jumps: dict[int, set[int]] = {}
        for at, targets in self.targets.items():
            block = bisect_right(self.starts, at) - 1
            jumps.setdefault(block, set()).update(
                self.number[t] for t in targets if t in self.number
            )
        successors: list[tuple[int, ...]] = []
        for block, (start, end) in enumerate(zip(self.starts, self.ends, strict=True)):
            out = jumps.get(block, set[int]())
            last = self.instructions[end - 1]
            if last.base == "BSYNC" and end not in self.resume.get(last.operands[0], ()):
                out.update(self._block_numbers(self.resume.get(last.operands[0], set())))
            if last.base == "RET":
                out.update(self.return_blocks.get(self.subroutine(start), ()))
            unknown = last.base in _INDIRECT_BRANCHES and end - 1 not in self.targets
            if unknown and not has_unread_targets(last):
                recorded = self._block_numbers(set(self.indirect_targets))
                out.update(recorded if self.indirect_targets else self.labelled_blocks)
            if end < len(self.instructions) and falls_through(last):
                out.add(self.number[end])
            successors.append(tuple(sorted(out)))
        return successors

    def adjoins_unknown_code(self, is_kernel: bool) -> list[bool]:
        """For each block: whether unknown code may run immediately before or after it."""
        unknown_calls = {
            end
            for end in self.ends
            if _is_call(self.instructions[end - 1]) and end - 1 not in self.targets
        }
        unknown_callers = self._subroutines_with_unknown_callers(is_kernel)
        return [
            bool({start, end} & unknown_calls)
            or (
                self.subroutine(start) in unknown_callers
                and (start in self.subroutine_starts or self.instructions[end - 1].base == "RET")
            )
            for start, end in zip(self.starts, self.ends, strict=True)
        ]

    def _subroutines_with_unknown_callers(self, is_kernel: bool) -> set[int]:
        """Subroutines that no CALL of this function names; all if the function calls by pointer."""
        callees = set(range(1 if is_kernel else 0, len(self.subroutine_starts)))
        if any(_is_call(i) and _calls_by_pointer(i) for i in self.instructions):
            return callees
        return callees - set(self.return_blocks)


def _targets(instruction: Instruction, labels: Mapping[str, int]) -> list[int]:
    """Positions that the instruction may jump to.

    Three kinds of instructions name a label and do not jump to it.  BSSY notes where its BSYNC
    continues.  The label of RET is in the callers of its subroutine.  The register of a call by
    pointer is relative to its label.  An indirect branch has the targets of its own record.
    """
    if instruction.pipe is not Pipe.CONTROL or instruction.base in ("BSSY", "RET"):
        return []
    if _is_call(instruction) and _calls_by_pointer(instruction):
        return []
    if has_unread_targets(instruction):
        return []
    if instruction.base in _INDIRECT_BRANCHES:
        recorded = _recorded_targets(instruction)
        return [labels[n] for n in recorded] if all(n in labels for n in recorded) else []
    names = [name for operand in instruction.operands for name in _LABEL_OPERAND.findall(operand)]
    return [labels[name] for name in names if name in labels]


def _recorded_targets(branch: Instruction) -> list[str]:
    """The labels that an indirect branch may jump to; empty if the cubin does not record them."""
    found = _BRANCH_TARGETS.search(branch.text)
    return [name.strip() for name in found[1].split(",")] if found else []


def has_unread_targets(branch: Instruction) -> bool:
    """Whether the record of an indirect branch names the start of the section alone.

    ptxas 11.8 leaves zeros in the record for sm_90, and no jump leads there.
    """
    recorded = _recorded_targets(branch) if branch.base in _INDIRECT_BRANCHES else []
    return bool(recorded) and all(name.startswith(".text.") for name in recorded)


def _resume_positions(
    instructions: Sequence[Instruction], labels: Mapping[str, int]
) -> dict[str, set[int]]:
    """Convergence register -> the positions where a BSYNC on it may continue.

    These are the targets of all BSSYs on the register.
    """
    positions: dict[str, set[int]] = {}
    for instruction in instructions:
        if instruction.base == "BSSY":
            for name in _LABEL_OPERAND.findall(instruction.operands[-1]):
                if name in labels:
                    positions.setdefault(instruction.operands[0], set()).add(labels[name])
    return positions


def _is_call(instruction: Instruction) -> bool:
    return instruction.base == "CALL"


def _calls_by_pointer(call: Instruction) -> bool:
    return not call.operands[-1].startswith("`")


def falls_through(last: Instruction) -> bool:
    """Whether control may continue after a block's last instruction."""
    if last.base not in _NO_FALL_THROUGH or last.is_guarded:
        return True
    return last.base in ("BRA", "JMP") and not last.operands[0].startswith("`")
