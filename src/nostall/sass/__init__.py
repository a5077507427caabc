"""SASS level: parse a cubin into a program, verify a changed schedule and write the cubin back."""

from nostall.sass.program import Function, Instruction, Program
from nostall.sass.safety import Finding, Verdict, validate, verify

__all__ = ["Finding", "Function", "Instruction", "Program", "Verdict", "validate", "verify"]
