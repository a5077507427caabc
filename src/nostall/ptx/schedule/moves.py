"""The moves of a PTX state: immutable records, each with its legality condition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nostall.core.errors import IllegalMove
from nostall.core.space import Tags
from nostall.ptx.schedule.levers import Lever, LeverValue


class IllegalShift(IllegalMove):
    """A unit would pass one that it depends on, pass a declaration, or leave its block."""


class IllegalSetting(IllegalMove):
    """The value is not offered for this setting, or the setting has it already."""


@dataclass(frozen=True, slots=True)
class Shift:
    """Move a unit of a block by ``offset`` positions; the units that it passes close up.

    Legal if the unit and those that it passes do not depend on each other, and each stays behind
    the declarations of its names.
    """

    block: int
    """Number of the block in the space."""
    unit: int
    """Index of the unit in the original order of the block."""
    offset: int
    """Number of positions; negative towards the start of the block."""
    tags: Tags
    error: ClassVar[type[IllegalMove]] = IllegalShift

    def __str__(self) -> str:
        return f"shift unit {self.unit} of block {self.block} by {self.offset:+d}"


@dataclass(frozen=True, slots=True)
class SetLever:
    """Give a setting of the whole kernel another value.

    Legal if the space offers the value, and the state has another one.
    """

    lever: Lever
    value: LeverValue
    tags: Tags
    error: ClassVar[type[IllegalMove]] = IllegalSetting

    def __str__(self) -> str:
        return f"{self.lever} = {self.value!r}"


@dataclass(frozen=True, slots=True)
class SetHint:
    """Give a memory access another cache hint; "" removes it.

    Legal if the space offers hints, the instruction can have this one, and it has another one.
    """

    instruction: int
    """Index of the instruction in the kernel."""
    hint: str
    tags: Tags
    error: ClassVar[type[IllegalMove]] = IllegalSetting

    def __str__(self) -> str:
        return f"hint of instruction {self.instruction} = {self.hint!r}"


PtxMove = Shift | SetLever | SetHint
