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

_WAIT, _TRIGGER = "griddepcontrol.wait;\n\t", "griddepcontrol.launch_dependents;\n\t"
# For each value of PtxState.dependent_launch, the text at the start of the kernel and that before
# its first access. With the trigger the next kernel may start while this one runs: correct only if
# every kernel that is launched as a dependent of this one waits, which this module cannot know.
_TEXTS: dict[DependentLaunch, tuple[str, str]] = {
    "wait": ("", _WAIT),
    "wait+trigger": ("", _WAIT + _TRIGGER),
    "trigger+wait": (_TRIGGER, _WAIT),
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


def dependent_launch_edits(
    module: Module, functions: Sequence[Function], mode: DependentLaunch, order: Sequence[int]
) -> list[Edit]:
    """The insertions for the kernel ``functions[0]``, whose first block has this order of units.

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
    at_start, before_access = _TEXTS[mode]
    if not kernel.outer_blocks or kernel.instructions[0].ends_block:
        start = kernel.instructions[0].start if kernel.instructions else kernel.end - 1
        return [_insertion(start, at_start + before_access)]
    units = kernel.outer_blocks[0].units
    start = units[order[0]].start
    accesses = [units[number].start for number in order if _accesses_memory(units[number])]
    # Without an access the wait follows the last slot: all units of the block precede it.
    border = accesses[0] if accesses else units[-1].end
    if border == start:
        return [_insertion(start, at_start + before_access)]
    wait = _insertion(border, before_access if accesses else f"\n\t{before_access}")
    return [wait, *([_insertion(start, at_start)] if at_start else [])]


def _insertion(offset: int, text: str) -> Edit:
    return Edit(offset, offset, text)


def _accesses_memory(unit: Unit) -> bool:
    return bool(_ACCESSES & (unit.reads | unit.writes))
