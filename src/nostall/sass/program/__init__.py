"""In-memory program: functions, basic blocks, and instructions with their defs and uses."""

from nostall.sass.program.blocks import Block
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.program import Function, Program

__all__ = ["Block", "Function", "Instruction", "Program"]
