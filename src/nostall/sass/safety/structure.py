"""Structure check: the candidate has the original's instructions in another order, nothing else.

- The payloads of each block are a permutation of the original's.
- Pinned instructions and scheduling barriers keep their place, barriers also their scoreboards.
- Outside the machine code only recorded offsets differ, exactly as the permutation requires.
"""

from __future__ import annotations

import struct
from collections import Counter, defaultdict, deque

from nostall.core.errors import BadBinary
from nostall.sass.binary.cubin import Cubin
from nostall.sass.binary.encoding import PAYLOAD_MASK, WORD_BYTES
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.program import Function, Program
from nostall.sass.safety.verdict import Finding


class Mismatch(Exception):
    """The candidate is not a re-scheduling of the original; ``findings`` say why."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__(f"{len(findings)} findings")
        self.findings = findings


def align(original: Program, candidate: Program) -> Program:
    """Give each instruction of the candidate its index in the original.

    Raises :class:`Mismatch` if instructions were added, lost or changed, or if bytes outside the
    machine code differ from what the permutation requires.
    """
    if original.sm != candidate.sm:
        reason = f"is for sm_{candidate.sm}; the original is for sm_{original.sm}"
        raise Mismatch([_program_finding("architecture", reason)])
    expected = [(f.name, len(f.instructions)) for f in original.functions]
    functions = [(f.name, len(f.instructions)) for f in candidate.functions]
    if expected != functions:
        reason = (
            f"has the functions (name, instructions) {functions}; the original has {expected}, and "
            "they must be equal"
        )
        raise Mismatch([_program_finding("functions", reason)])
    aligned = original
    for old, new in zip(original.functions, candidate.functions, strict=True):
        aligned = aligned.with_function(old.reordered(_match_instructions(old, new)))
    findings = [f for function in aligned.functions for f in _fixed_findings(original, function)]
    if aligned.to_cubin() != candidate.cubin.data:
        findings.append(
            _program_finding(
                "bytes-outside",
                "bytes outside the instructions differ from what the new order requires: recorded "
                "offsets and relocations must move with their instructions, nothing else may "
                "change",
            )
        )
    if findings:
        raise Mismatch(findings)
    return aligned


def changed_words(original: Program, candidate: Cubin) -> list[Finding]:
    """Findings about instruction words that a block of the original does not have.

    The words are compared without their control bits and without disassembling them, so a word
    that nvdisasm cannot decode is found, too.  Functions of other names or sizes are left out.
    """
    findings: list[Finding] = []
    texts = {text.name: text for text in candidate.texts}
    for function in original.functions:
        text = texts.get(function.name)
        if text is None or text.size != function.text.size:
            continue
        code = candidate.data[text.file_offset : text.file_offset + text.size]
        words = [lo | hi << 64 for lo, hi in struct.iter_unpack("<QQ", code)]
        payloads = [word & PAYLOAD_MASK for word in words]
        for block in function.blocks:
            known = Counter(i.payload for i in function.instructions[block.start : block.end])
            for position in range(block.start, block.end):
                known[payloads[position]] -= 1
                if known[payloads[position]] < 0:
                    findings.append(
                        _not_a_permutation(function.name, position, f"word {words[position]:#034x}")
                    )
    return findings


def undecodable(error: BadBinary) -> Finding:
    """The finding about a candidate that cannot be read."""
    return _program_finding("undecodable", f"the candidate cannot be decoded: {error}")


def _not_a_permutation(function: str, position: int, text: str) -> Finding:
    return Finding(
        "not-a-permutation",
        function,
        position * WORD_BYTES,
        text,
        "is not in this block of the original, or appears there less often; a block must keep its "
        "instructions",
        "structure",
    )


def _match_instructions(original: Function, candidate: Function) -> list[Instruction]:
    """The original instructions in the candidate's order, with the candidate's control words.

    Instructions match by payload inside a block.  Equal payloads match in their order.
    """
    matched: list[Instruction] = []
    findings: list[Finding] = []
    for block in original.blocks:
        unmatched: dict[int, deque[Instruction]] = defaultdict(deque)
        for instruction in original.instructions[block.start : block.end]:
            unmatched[instruction.payload].append(instruction)
        for position in range(block.start, block.end):
            word = candidate.instructions[position]
            if not unmatched[word.payload]:
                findings.append(_not_a_permutation(original.name, position, word.text))
            else:
                matched.append(unmatched[word.payload].popleft().with_control(word.control))
    if findings:
        raise Mismatch(findings)
    return matched


def _fixed_findings(original: Program, candidate: Function) -> list[Finding]:
    """Findings about pinned and frozen instructions and scheduling barriers that changed."""
    before = original.function(candidate.name)
    findings: list[Finding] = []

    def report(kind: str, position: int, instruction: Instruction, reason: str) -> None:
        findings.append(
            Finding(kind, candidate.name, position * 16, instruction.text, reason, "structure")
        )

    for position, instruction in enumerate(candidate.instructions):
        old = before.instructions[instruction.index]
        if instruction.index in before.pinned and position != instruction.index:
            report(
                "pinned-moved",
                position,
                instruction,
                "moved, but a record of unknown layout may name its offset; it must not move",
            )
        if instruction.index in before.frozen and (position, instruction) != (
            instruction.index,
            old,
        ):
            report(
                "open-changed",
                position,
                instruction,
                "changed, but code outside this function may run next to its block; the block "
                "must stay as it is",
            )
        if instruction.is_barrier:
            for kind, reason in _barrier_changes(old, instruction):
                report(kind, position, instruction, reason)
    return findings


def _barrier_changes(old: Instruction, new: Instruction) -> list[tuple[str, str]]:
    """(kind, reason) of each forbidden change in the control word of a scheduling barrier."""
    before, after = old.control, new.control
    change = f"{before} to {after}"
    changes: list[tuple[str, str]] = []
    if (before.write_sb, before.read_sb) != (after.write_sb, after.read_sb):
        changes.append(("wall-changed", f"scoreboards changed from {change}; they must not"))
    if new.has_batch_field and before.reuse != after.reuse:
        changes.append(("wall-changed", f"batch field changed from {change}; it must not"))
    if before.wait & ~after.wait:
        changes.append(("lost-wait", f"waits for fewer scoreboards than in the original: {change}"))
    if after.stall < before.stall or after.drains != before.drains:
        changes.append(
            ("wall-changed", f"stalls less, or drains otherwise, than in the original: {change}")
        )
    return changes


def _program_finding(kind: str, reason: str) -> Finding:
    """A finding about the whole cubin."""
    return Finding(kind, "", 0, "", reason, "structure")
