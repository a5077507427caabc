"""The verdict on a cubin, alone (:func:`validate`) or against its original (:func:`verify`)."""

from __future__ import annotations

from nostall.sass.program.program import Program
from nostall.sass.safety.hazards import HazardValidator
from nostall.sass.safety.order import order_findings
from nostall.sass.safety.structure import Mismatch, align
from nostall.sass.safety.symbolic import SymbolicValidator
from nostall.sass.safety.verdict import Finding, Verdict


def validate(data: bytes) -> Verdict:
    """Judge one cubin absolutely: is everything in flight protected, is every encoding legal?

    Raises :class:`~nostall.core.errors.BadBinary` when ``data`` cannot be read.
    """
    return validate_program(Program.from_cubin(data))


def validate_program(program: Program) -> Verdict:
    """:func:`validate` for a program that was read already."""
    hazards, symbolic = HazardValidator(program.sm), SymbolicValidator(program.sm)
    findings: list[Finding] = []
    for function in program.functions:
        findings += hazards.check(function)
        findings += symbolic.check(function)
    return Verdict(tuple(findings), _count(program))


def verify(original: bytes, candidate: bytes) -> Verdict:
    """Is ``candidate`` a safe re-scheduling of ``original``?

    Three parts: structure (the same instructions, nothing else changed), the hazard validator, and
    symbolic translation validation.  Never short-circuits on equal bytes.  Raises
    :class:`~nostall.core.errors.BadBinary` when either cannot be read.
    """
    before = Program.from_cubin(original)
    return verify_program(before, Program.from_cubin(candidate))


def verify_program(before: Program, candidate: Program) -> Verdict:
    """:func:`verify` for programs that were read already."""
    try:
        after = align(before, candidate)
    except Mismatch as mismatch:
        return Verdict(tuple(mismatch.findings), _count(candidate))
    hazards, symbolic = HazardValidator(before.sm), SymbolicValidator(before.sm)
    findings: list[Finding] = []
    for old, new in zip(before.functions, after.functions, strict=True):
        findings += hazards.compare(old, new)
        findings += order_findings(old, new)
        findings += symbolic.compare(old, new)
    return Verdict(tuple(findings), _count(after))


def _count(program: Program) -> int:
    return sum(len(f.instructions) for f in program.functions)
