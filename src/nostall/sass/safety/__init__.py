"""What an order may be: latencies, hazards, symbolic validation, and the verdict."""

from nostall.sass.safety.verdict import Finding, Verdict
from nostall.sass.safety.verify import validate, validate_program, verify, verify_program

__all__ = ["Finding", "Verdict", "validate", "validate_program", "verify", "verify_program"]
