"""The native-instruction level: read a cubin, judge a schedule, change it, write it back."""

from nostall.sass.program import Function, Instruction, Program
from nostall.sass.safety import Finding, Verdict, validate, verify

__all__ = ["Finding", "Function", "Instruction", "Program", "Verdict", "validate", "verify"]
