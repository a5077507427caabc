"""Hand-written kernels for the tests of the SM model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from nostall.core.launch import LaunchSpec
from nostall.sass.binary.cubin import Cubin, TextSection
from nostall.sass.binary.elf import Elf
from nostall.sass.binary.encoding import Control
from nostall.sass.model import SmModel
from nostall.sass.program.blocks import build_blocks
from nostall.sass.program.instruction import Instruction, parse_text
from nostall.sass.program.program import Function, Program
from nostall.sass.schedule.state import Schedule

ONE_BLOCK = LaunchSpec(block=(128, 1, 1))
"""One block of one warp per scheduler."""

_REGISTER = re.compile(r"^R(\d+)(?:\.reuse)?$")


def ins(
    text: str,
    stall: int = 1,
    *,
    yields: bool = False,
    write: int = 7,
    read: int = 7,
    wait: int = 0,
    reuse: int = 0,
) -> Instruction:
    """An instruction whose first register operand is the result, the others the sources a, b, c."""
    guard, opcode, operands = parse_text(text)
    registers = [int(m[1]) for operand in operands if (m := _REGISTER.match(operand))]
    payload = sum(r << low for r, low in zip(registers[1:], (24, 32, 64), strict=False))
    for low in (24, 32, 64)[max(0, len(registers) - 1) :]:
        payload |= 255 << low
    control = Control(stall, yields, write, read, wait, reuse)
    defs, uses = tuple(registers[:1]), tuple(registers[1:])
    return Instruction(
        0, text, payload, control, opcode, guard, operands, defs, uses, (), frozenset()
    )


def function(
    instructions: Sequence[Instruction], labels: Mapping[str, int] | None = None
) -> Function:
    """A kernel; ``labels`` maps each label, which branches name as `(LABEL), to a position."""
    numbered = tuple(
        Instruction(
            index, i.text, i.payload, i.control, i.opcode, i.guard, i.operands, i.defs, i.uses,
            i.guard_registers, i.address_registers,
        )
        for index, i in enumerate(instructions)
    )  # fmt: skip
    text = TextSection("kernel", 0, 16 * len(numbered), True, ((0, "kernel"),), (), frozenset())
    blocks = build_blocks(numbered, labels or {}, [0], [], is_kernel=True)
    return Function("kernel", text, numbered, blocks)


def program(kernel: Function, sm: int = 80) -> Program:
    """A program with this kernel only."""
    return Program(Cubin(Elf(b"", 65, 8, 0, ()), sm, (kernel.text,)), (kernel,))


def model(
    instructions: Sequence[Instruction],
    *,
    labels: Mapping[str, int] | None = None,
    sm: int = 80,
    launch: LaunchSpec = ONE_BLOCK,
    warps: int | None = 1,
    assumed_trips: int = 8,
    kept_iterations: int | None = None,
) -> tuple[SmModel, Schedule]:
    """The model of a hand-written kernel, and its schedule."""
    kernel = function(instructions, labels)
    sm_model = SmModel(
        program(kernel, sm),
        kernel,
        launch,
        warps=warps,
        assumed_trips=assumed_trips,
        kept_iterations=kept_iterations,
    )
    return sm_model, Schedule.from_function(kernel)


def cycles(instructions: Sequence[Instruction], *, warps: int = 1, sm: int = 80) -> float:
    """Modelled cycles of a straight-line kernel."""
    sm_model, state = model(instructions, warps=warps, sm=sm)
    return sm_model.cycles(state)
