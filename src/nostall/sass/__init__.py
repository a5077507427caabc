"""SASS level: parse a cubin into a program, verify a changed schedule and write the cubin back."""

from typing import TYPE_CHECKING

from nostall.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from nostall.sass.program import Function, Instruction, Program
    from nostall.sass.safety import Finding, Verdict, validate, verify

__all__ = ["Finding", "Function", "Instruction", "Program", "Verdict", "validate", "verify"]

__getattr__ = lazy_exports(__name__, __all__, "program", "safety")
