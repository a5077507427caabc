"""Portfolio of the assembler search: kernel name, register budgets, options, versions, hints."""

from __future__ import annotations

from collections.abc import Sequence

from nostall.core import LaunchSpec
from nostall.ptx.assemble.versions import Assembler
from nostall.ptx.schedule.levers import Levers

NAME_PREFIX = "cutlass_"
"""Start of a kernel's name for which ptxas schedules matrix instructions in another way."""
OPTIONS: tuple[tuple[str, ...], ...] = (
    *((f"--register-usage-level={level}",) for level in range(11)),
    ("--opt-level=1",),
    ("--opt-level=2",),
    ("--disable-optimizer-constants",),
)
"""Options of ptxas that change registers or order; none changes what a load or store does."""
_REGISTER_FILE = 65536
"""32-bit registers of an SM, on all supported architectures."""
_MAX_BLOCKS = 16
"""Blocks an SM for which a budget is tried."""
_MAX_REGISTERS, _MIN_REGISTERS = 255, 16
_ALLOCATION_UNIT = 8
"""Registers a thread come in multiples of this."""
_LEAST_PART = 0.6
"""Smallest budget, as a part of the original's registers; less only spills."""
_STEPS_UP = 5
"""Budgets in steps of the allocation unit that do not limit the original."""
_LARGE_BUDGETS = (200, _MAX_REGISTERS)


def make_levers(
    kernel: str,
    registers: int,
    launch: LaunchSpec | None,
    assemblers: Sequence[Assembler],
) -> Levers:
    """The settings that a search of ``kernel`` may change.

    ``registers``: those of a thread of the original.  ``assemblers``: usable versions of ptxas,
    the compiler's own first.
    """
    return Levers(
        kernel_names=("", NAME_PREFIX + kernel),
        max_registers=(None, *register_budgets(registers, launch)),
        options=((), *OPTIONS),
        assemblers=("", *(a.version for a in assemblers[1:])),
    )


def register_budgets(registers: int, launch: LaunchSpec | None) -> tuple[int, ...]:
    """Register limits that let another number of blocks run on an SM, and steps around them.

    A limit above ``registers``, the number that the original uses, changes the code, too: ptxas
    schedules for the limit.  Descending; a block of the launch fits on an SM with each.
    """
    threads = launch.block[0] * launch.block[1] * launch.block[2] if launch else 0
    most = min(_MAX_REGISTERS, _REGISTER_FILE // threads if threads else _MAX_REGISTERS)
    first_above = -(-registers // _ALLOCATION_UNIT) * _ALLOCATION_UNIT
    budgets = {registers - _ALLOCATION_UNIT, registers - 2 * _ALLOCATION_UNIT, *_LARGE_BUDGETS}
    budgets |= {first_above + _ALLOCATION_UNIT * step for step in range(_STEPS_UP)}
    if threads:
        for blocks in range(1, _MAX_BLOCKS + 1):
            limit = _REGISTER_FILE // (threads * blocks)
            budgets.add(min(_MAX_REGISTERS, limit // _ALLOCATION_UNIT * _ALLOCATION_UNIT))
    least = max(_MIN_REGISTERS, _LEAST_PART * registers)
    return tuple(sorted((b for b in budgets if least <= b <= most), reverse=True))
