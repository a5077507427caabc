"""Entry points of the verifier: check one cubin, or a candidate against its original."""

from __future__ import annotations

from nostall.core.errors import BadBinary
from nostall.sass.binary.cubin import Cubin, require_bytes
from nostall.sass.program.program import Program
from nostall.sass.safety.hazards.validator import HazardValidator
from nostall.sass.safety.order import order_findings
from nostall.sass.safety.structure import Mismatch, align, changed_words, undecodable
from nostall.sass.safety.symbolic.validator import SymbolicValidator
from nostall.sass.safety.verdict import Finding, Verdict


def validate(data: bytes, *, measured_latencies: bool = False) -> Verdict:
    """Check that a cubin protects every result in flight and that its control words are legal.

    ``measured_latencies``: issue distances measured on a GPU may lower mined ones.  Raises
    :class:`~nostall.core.errors.UnsupportedArchitecture` if there are none for the cubin.
    Raises :class:`~nostall.core.errors.BadBinary` if ``data`` is not a readable cubin.
    """
    return validate_program(Program.from_cubin(data), measured_latencies=measured_latencies)


def validate_program(program: Program, *, measured_latencies: bool = False) -> Verdict:
    """Check one cubin that is parsed already; see :func:`validate`."""
    hazards, symbolic = _validators(program.sm, measured_latencies)
    findings: list[Finding] = []
    remarks: list[Finding] = []
    for function in program.functions:
        findings += hazards.check(function)
        findings += symbolic.check(function)
        remarks += hazards.remarks(function)
    return Verdict(tuple(findings), _instruction_count(program), tuple(remarks))


def verify(original: bytes, candidate: bytes, *, measured_latencies: bool = False) -> Verdict:
    """Check whether ``candidate`` is a safe re-scheduling of ``original``.

    There are three parts: structure (the same instructions, nothing else changed), hazard
    validation, and symbolic translation validation.  Equal bytes are checked like any others.  A
    candidate that cannot be decoded is unsafe.  ``measured_latencies``: see :func:`validate`.
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
    return verify_program(
        original_program, candidate_program, measured_latencies=measured_latencies
    )


def verify_program(
    original: Program, candidate: Program, *, measured_latencies: bool = False
) -> Verdict:
    """Check a re-scheduling of programs that are parsed already; see :func:`verify`.

    If one function differs from the original, the findings about functions that are equal to the
    original's are remarks: they compute what the original computes.
    """
    try:
        aligned = align(original, candidate)
    except Mismatch as mismatch:
        return Verdict(tuple(mismatch.findings), _instruction_count(candidate))
    hazards, symbolic = _validators(original.sm, measured_latencies)
    findings: list[Finding] = []
    remarks: list[Finding] = []
    pairs = list(zip(original.functions, aligned.functions, strict=True))
    is_changed = any(before.instructions != after.instructions for before, after in pairs)
    for before, after in pairs:
        is_kept = is_changed and before.instructions == after.instructions
        found = remarks if is_kept else findings
        found += hazards.compare(before, after)
        found += order_findings(before, after)
        found += symbolic.compare(before, after)
        remarks += hazards.remarks(before)
    return Verdict(tuple(findings), _instruction_count(aligned), tuple(remarks))


def _validators(sm: int, measured_latencies: bool) -> tuple[HazardValidator, SymbolicValidator]:
    return (
        HazardValidator(sm, measured_latencies=measured_latencies),
        SymbolicValidator(sm, measured_latencies=measured_latencies),
    )


def _instruction_count(program: Program) -> int:
    return sum(len(f.instructions) for f in program.functions)
