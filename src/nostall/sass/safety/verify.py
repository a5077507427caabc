"""Entry points of the verifier: check one cubin, or a candidate against its original."""

from __future__ import annotations

from nostall.core.errors import BadBinary
from nostall.sass.binary.cubin import Cubin, require_bytes
from nostall.sass.program.program import Program
from nostall.sass.safety.hazards import HazardValidator
from nostall.sass.safety.order import order_findings
from nostall.sass.safety.structure import Mismatch, align, changed_words, undecodable
from nostall.sass.safety.symbolic.validator import SymbolicValidator
from nostall.sass.safety.verdict import Finding, Verdict


def validate(data: bytes) -> Verdict:
    """Check that a cubin protects every result in flight and that its control words are legal.

    Raises :class:`~nostall.core.errors.BadBinary` if ``data`` is not a readable cubin.
    """
    return validate_program(Program.from_cubin(data))


def validate_program(program: Program) -> Verdict:
    """Check one cubin that is parsed already; see :func:`validate`."""
    hazards, symbolic = HazardValidator(program.sm), SymbolicValidator(program.sm)
    findings: list[Finding] = []
    remarks: list[Finding] = []
    for function in program.functions:
        findings += hazards.check(function)
        findings += symbolic.check(function)
        remarks += hazards.remarks(function)
    return Verdict(tuple(findings), _instruction_count(program), tuple(remarks))


def verify(original: bytes, candidate: bytes) -> Verdict:
    """Check whether ``candidate`` is a safe re-scheduling of ``original``.

    There are three parts: structure (the same instructions, nothing else changed), hazard
    validation, and symbolic translation validation.  Equal bytes are checked like any others.  A
    candidate that cannot be decoded is unsafe.
    Raises :class:`~nostall.core.errors.BadBinary` if ``original`` is not a readable cubin.
    """
    require_bytes(original, "the original")
    require_bytes(candidate, "the candidate")
    original_program = Program.from_cubin(original)
    try:
        changed = changed_words(original_program, Cubin.parse(candidate))
        if changed:
            return Verdict(tuple(changed), 0)
        candidate_program = Program.from_cubin(candidate)
    except BadBinary as error:
        return Verdict((undecodable(error),), 0)
    return verify_program(original_program, candidate_program)


def verify_program(original: Program, candidate: Program) -> Verdict:
    """Check a re-scheduling of programs that are parsed already; see :func:`verify`."""
    try:
        aligned = align(original, candidate)
    except Mismatch as mismatch:
        return Verdict(tuple(mismatch.findings), _instruction_count(candidate))
    hazards, symbolic = HazardValidator(original.sm), SymbolicValidator(original.sm)
    findings: list[Finding] = []
    remarks: list[Finding] = []
    for before, after in zip(original.functions, aligned.functions, strict=True):
        findings += hazards.compare(before, after)
        findings += order_findings(before, after)
        findings += symbolic.compare(before, after)
        remarks += hazards.remarks(before)
    return Verdict(tuple(findings), _instruction_count(aligned), tuple(remarks))


def _instruction_count(program: Program) -> int:
    return sum(len(f.instructions) for f in program.functions)
