"""Basic blocks and the control-flow graph of one function.

Where control can go is over-approximated: an edge too many makes nostall more careful, a missing
one would make it wrong.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Does, Pipe

_TARGET = re.compile(r"`\((.+?)\)")
_NO_FALL = frozenset(("BRA", "JMP", "EXIT", "RET", "BRX", "BRXU", "JMX", "JMXU", "KILL", "LONGJMP"))
_INDIRECT = frozenset(("BRX", "BRXU", "JMX", "JMXU"))


@dataclass(frozen=True, slots=True)
class Block:
    """Instructions ``start`` .. ``end`` - 1 by position; ``succ`` and ``pred`` are block numbers.

    ``external``: control can enter from outside the function's own graph (entry, call target).
    ``region``: number of the subroutine inside the text section that the block belongs to.
    ``open``: what runs right before or right after it is code that this graph does not know.
    """

    start: int
    end: int
    succ: tuple[int, ...]
    pred: tuple[int, ...]
    external: bool
    region: int
    open: bool

    def __len__(self) -> int:
        return self.end - self.start


def build(
    instructions: Sequence[Instruction],
    labels: Mapping[str, int],
    entries: Sequence[int],
    indirect: Sequence[int],
    is_kernel: bool,
) -> tuple[Block, ...]:
    """Cut at labels that something jumps to, at entries, and after whatever ends a block.

    ``labels`` maps names to positions; ``entries`` are positions where a symbol begins;
    ``indirect`` are positions that an indirect branch may reach; ``is_kernel``: the first
    instruction is where a launch begins, not where a caller jumps to.
    """
    count = len(instructions)
    targets = {at: ts for at, i in enumerate(instructions) if (ts := _targets(i, labels))}
    leaders = {0, *entries, *indirect}.union(*targets.values())
    leaders.update(at + 1 for at, i in enumerate(instructions) if i.does & Does.ENDS_BLOCK)
    resume = _resume_points(instructions, labels)
    leaders.update(*resume.values())
    called = {t for at, ts in targets.items() if _is_call(instructions[at]) for t in ts}
    gates = sorted({0, *entries, *called})
    starts = sorted(x for x in leaders | called if 0 <= x < count)
    number = {start: i for i, start in enumerate(starts)}
    ends = [*starts[1:], count]
    wild = [number[x] for x in {*indirect, *labels.values()} if x in number]
    back: dict[int, set[int]] = {}
    for end in ends:
        if _is_call(instructions[end - 1]) and end < count:
            for target in targets.get(end - 1, ()):
                back.setdefault(_region(gates, target), set()).add(number[end])
    jumps: dict[int, set[int]] = {}
    for at, ts in targets.items():
        block = bisect_right(starts, at) - 1
        jumps.setdefault(block, set()).update(number[t] for t in ts if t in number)
    succ: list[tuple[int, ...]] = []
    for block, (start, end) in enumerate(zip(starts, ends, strict=True)):
        out = jumps.get(block, set[int]())
        last = instructions[end - 1]
        if last.base == "BSYNC" and end not in resume.get(last.operands[0], ()):
            out.update(number[x] for x in resume.get(last.operands[0], ()) if x in number)
        if last.base == "RET":
            out.update(back.get(_region(gates, start), ()))
        if last.base in _INDIRECT and end - 1 not in targets:
            out.update(number[x] for x in indirect if x in number) if indirect else out.update(wild)
        if end < count and _falls_through(last):
            out.add(number[end])
        succ.append(tuple(sorted(out)))
    pred: list[list[int]] = [[] for _ in starts]
    for i, out_edges in enumerate(succ):
        for j in out_edges:
            pred[j].append(i)
    outside = {number[e] for e in (0, *entries) if e in number}
    away = {end for end in ends if _is_call(instructions[end - 1]) and end - 1 not in targets}
    unknown = _called_from_anywhere(instructions, gates, [*back], is_kernel)
    opened = [
        bool({start, end} & away)
        or (
            _region(gates, start) in unknown
            and (start in gates or instructions[end - 1].base == "RET")
        )
        for start, end in zip(starts, ends, strict=True)
    ]
    return tuple(
        Block(
            start, ends[i], succ[i], tuple(pred[i]), i in outside, _region(gates, start), opened[i]
        )
        for i, start in enumerate(starts)
    )


def _called_from_anywhere(
    instructions: Sequence[Instruction], gates: list[int], called: Sequence[int], is_kernel: bool
) -> set[int]:
    """The subroutines whose callers are not all known: nobody here calls them by name, or somebody
    calls by pointer."""
    callees = set(range(1 if is_kernel else 0, len(gates)))
    by_pointer = any(_is_call(i) and _by_pointer(i) for i in instructions)
    return callees if by_pointer else callees - set(called)


def _region(gates: list[int], position: int) -> int:
    return bisect_right(gates, position) - 1


def _targets(instruction: Instruction, labels: Mapping[str, int]) -> list[int]:
    """Positions that the instruction may jump to.  BSSY only notes where its BSYNC continues;
    the label of RET is where its subroutine's callers are, and that of a call by pointer is what
    its register is relative to."""
    if instruction.row.pipe is not Pipe.CONTROL or instruction.base in ("BSSY", "RET"):
        return []
    if _is_call(instruction) and _by_pointer(instruction):
        return []
    found = [name for operand in instruction.operands for name in _TARGET.findall(operand)]
    return [labels[name] for name in found if name in labels]


def _resume_points(
    instructions: Sequence[Instruction], labels: Mapping[str, int]
) -> dict[str, set[int]]:
    """Where a BSYNC on each convergence register may continue: the targets of its BSSYs."""
    found: dict[str, set[int]] = {}
    for instruction in instructions:
        if instruction.base == "BSSY":
            for name in _TARGET.findall(instruction.operands[-1]):
                if name in labels:
                    found.setdefault(instruction.operands[0], set()).add(labels[name])
    return found


def _is_call(instruction: Instruction) -> bool:
    return instruction.base == "CALL"


def _by_pointer(call: Instruction) -> bool:
    return not call.operands[-1].startswith("`")


def _falls_through(last: Instruction) -> bool:
    if last.base not in _NO_FALL or last.is_guarded:
        return True
    return last.base in ("BRA", "JMP") and not last.operands[0].startswith("`")
