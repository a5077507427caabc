"""Verifier: hazard validation, symbolic translation validation and the resulting verdict."""

from nostall.sass.safety.verdict import Finding, Verdict
from nostall.sass.safety.verify import validate, validate_program, verify, verify_program

__all__ = ["Finding", "Verdict", "validate", "validate_program", "verify", "verify_program"]
