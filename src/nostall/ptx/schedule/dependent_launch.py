"""Programmatic dependent launch: a wait for the kernels before, and a signal for those after.

A kernel that is launched with the attribute of programmatic dependent launch may start while the
kernel before it still runs, and may access memory after ``griddepcontrol.wait`` only (PTX ISA 9.0,
section 9.7.13.13). The wait stands in the first block of the kernel, which every path to an exit
passes, directly before the first unit that may access memory in the state's order. Loads of kernel
parameters are no accesses; generic addresses, constants, textures, calls, fences and unknown
instructions are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from nostall.core.errors import BadInput
from nostall.ptx.program.blocks import Unit
from nostall.ptx.program.module import Function, Module
from nostall.ptx.program.resources import MEMORY, Resource
from nostall.ptx.schedule.edits import Edit
from nostall.ptx.schedule.state import DependentLaunch

# The text of each value of PtxState.dependent_launch. With the trigger the next kernel may start
# while this one runs: correct only if every kernel that is launched as a dependent of this one
# waits, which this module cannot know.
_TEXTS: dict[DependentLaunch, str] = {
    "wait": "griddepcontrol.wait;",
    "wait+trigger": "griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;",
}
_ACCESSES = MEMORY | {Resource.STABLE, Resource.FENCE}
_FIRST_ARCHITECTURE = 90


def can_wait(module: Module, functions: Iterable[Function]) -> bool:
    """Whether a wait can be inserted: the architecture has it, and no function has its own."""
    architecture = re.match(r"sm_(\d+)", module.target)
    return (
        architecture is not None
        and int(architecture.group(1)) >= _FIRST_ARCHITECTURE
        and not any(
            instruction.base == "griddepcontrol"
            for function in functions
            for instruction in function.instructions
        )
    )


def dependent_launch_edit(
    module: Module, functions: Sequence[Function], mode: DependentLaunch, order: Sequence[int]
) -> Edit:
    """The insertion for the kernel ``functions[0]``, whose first block has this order of units.

    Raises :class:`BadInput` if the kernel cannot have it.
    """
    if mode not in _TEXTS:
        raise BadInput(f"there is no dependent launch {mode!r}; choose one of {list(_TEXTS)}")
    kernel = functions[0]
    if not can_wait(module, functions):
        raise BadInput(
            f"{kernel.name} for {module.target} cannot get griddepcontrol.wait: it has "
            f"griddepcontrol already, or its architecture is below sm_{_FIRST_ARCHITECTURE}; "
            "leave dependent_launch empty"
        )
    text = _TEXTS[mode]
    if not kernel.outer_blocks or kernel.instructions[0].ends_block:
        start = kernel.instructions[0].start if kernel.instructions else kernel.end - 1
        return Edit(start, start, f"{text}\n\t")
    units = kernel.outer_blocks[0].units
    for number in order:
        if _accesses_memory(units[number]):
            start = units[number].start
            return Edit(start, start, f"{text}\n\t")
    end = units[-1].end
    return Edit(end, end, f"\n\t{text}")


def _accesses_memory(unit: Unit) -> bool:
    return bool(_ACCESSES & (unit.reads | unit.writes))
