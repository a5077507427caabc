"""The instructions of stitched kernels in code for sm_90, compiled without a GPU."""

from __future__ import annotations

from pathlib import Path

from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.runtime.launch_specs import launch_specs
from nostall.sass import Program as SassProgram
from nostall.tuning.source import compile_triton


def opcodes(program: Program, folder: Path) -> list[str]:
    """Of the first kernel of a program."""
    name, launch = next(iter(launch_specs(program).items()))
    path = folder / f"{name}.py"
    path.write_text(program.source)
    return opcodes_of(compile_triton(path, name, launch, "sm_90").cubin)


def opcodes_of(cubin: bytes) -> list[str]:
    return [one.opcode for one in SassProgram.from_cubin(cubin).kernel().instructions]
