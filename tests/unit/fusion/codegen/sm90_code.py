"""Opcodes of stitched kernels compiled for sm_90 without a GPU."""

from __future__ import annotations

from pathlib import Path

from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.runtime.launch_specs import launch_specs
from nostall.sass import Program as SassProgram
from nostall.tuning.sources.triton_source import compile_triton


def opcodes(program: Program, folder: Path) -> list[str]:
    """The opcodes of the first kernel of a program."""
    name, launch = next(iter(launch_specs(program).items()))
    path = folder / f"{name}.py"
    path.write_text(program.source)
    return cubin_opcodes(compile_triton(path, name, launch, "sm_90").cubin)


def cubin_opcodes(cubin: bytes) -> list[str]:
    return [each.opcode for each in SassProgram.from_cubin(cubin).kernel().instructions]
