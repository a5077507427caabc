"""Is the candidate the original's instructions in another order, and nothing else?

Payloads must be a permutation inside each block, pinned and structural instructions keep their
place and scoreboards, and outside the text only recorded offsets may differ, exactly as the
permutation demands.
"""

from __future__ import annotations

from collections import defaultdict, deque

from nostall.sass.program.instruction import Instruction
from nostall.sass.program.program import Function, Program
from nostall.sass.safety.verdict import Finding


class Mismatch(Exception):
    """The candidate is not a re-scheduling of the original; carries the findings."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__(f"{len(findings)} findings")
        self.findings = findings


def align(original: Program, candidate: Program) -> Program:
    """The candidate with each instruction given its original identity.

    Raises :class:`Mismatch` when instructions were added, lost or changed, or when bytes outside
    the text differ from what the permutation induces.
    """
    if original.sm != candidate.sm:
        raise Mismatch([_whole("architecture", f"sm_{candidate.sm}, original sm_{original.sm}")])
    names = [(f.name, len(f.instructions)) for f in original.functions]
    found = [(f.name, len(f.instructions)) for f in candidate.functions]
    if names != found:
        raise Mismatch([_whole("functions", f"has {found}, the original has {names}")])
    aligned = original
    for old, new in zip(original.functions, candidate.functions, strict=True):
        aligned = aligned.with_function(old.reordered(_identify(old, new)))
    findings = [f for old in aligned.functions for f in _kept_in_place(original, old)]
    if aligned.to_cubin() != candidate.cubin.data:
        findings.append(
            _whole(
                "bytes-outside",
                "bytes outside the instructions differ from what the new order implies (recorded "
                "offsets and relocations must move with their instructions, nothing else may)",
            )
        )
    if findings:
        raise Mismatch(findings)
    return aligned


def _identify(old: Function, new: Function) -> list[Instruction]:
    """Give every word of ``new`` the identity of the original word with the same payload in the
    same block; equal payloads are taken in order."""
    out: list[Instruction] = []
    findings: list[Finding] = []
    for block in old.blocks:
        waiting: dict[int, deque[Instruction]] = defaultdict(deque)
        for instruction in old.instructions[block.start : block.end]:
            waiting[instruction.payload].append(instruction)
        for at in range(block.start, block.end):
            word = new.instructions[at]
            if not waiting[word.payload]:
                findings.append(
                    Finding(
                        "not-a-permutation",
                        old.name,
                        at * 16,
                        word.text,
                        "is not (or not so often) in this block of the original",
                        "structure",
                    )
                )
            else:
                out.append(waiting[word.payload].popleft().with_control(word.control))
    if findings:
        raise Mismatch(findings)
    return out


def _kept_in_place(original: Program, candidate: Function) -> list[Finding]:
    """Walls and pinned instructions: same position, same scoreboards, no lost wait or stall."""
    before = original.function(candidate.name)
    findings: list[Finding] = []

    def report(kind: str, at: int, instruction: Instruction, reason: str) -> None:
        findings.append(
            Finding(kind, candidate.name, at * 16, instruction.text, reason, "structure")
        )

    for at, instruction in enumerate(candidate.instructions):
        old = before.instructions[instruction.index]
        if instruction.index in before.pinned and at != instruction.index:
            report("pinned-moved", at, instruction, "its offset is recorded in an unknown layout")
        if instruction.index in before.frozen and (at, instruction) != (instruction.index, old):
            report("open-changed", at, instruction, "code that cannot be seen runs next to it")
        if not instruction.is_wall:
            continue
        was, now = old.control, instruction.control
        if (was.write_sb, was.read_sb) != (now.write_sb, now.read_sb):
            report("wall-changed", at, instruction, f"scoreboards changed from {was} to {now}")
        if instruction.batch_field and was.reuse != now.reuse:
            report("wall-changed", at, instruction, f"batch field changed from {was} to {now}")
        if was.wait & ~now.wait:
            report("lost-wait", at, instruction, f"waits for less than before: {was} to {now}")
        if now.stall < was.stall or now.drains != was.drains:
            report("wall-changed", at, instruction, f"stalls less than before: {was} to {now}")
    return findings


def _whole(kind: str, reason: str) -> Finding:
    return Finding(kind, "", 0, "", reason, "structure")
