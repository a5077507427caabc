"""Settings that a PTX search may change beside the order of instructions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from nostall.ptx.schedule.state import DependentLaunch, PtxState

Lever = Literal["kernel_name", "max_registers", "options", "assembler", "dependent_launch"]
"""Field of :class:`PtxState` that is a setting of the whole kernel."""
LEVERS: tuple[Lever, ...] = get_args(Lever)
LeverValue = str | int | tuple[str, ...] | None


@dataclass(frozen=True)
class Levers:
    """Values that the moves of a space offer for each setting, the original's among them.

    The default offers none: only the order changes.
    """

    kernel_names: tuple[str, ...] = ("",)
    max_registers: tuple[int | None, ...] = (None,)
    options: tuple[tuple[str, ...], ...] = ((),)
    """Each value is a list of options for ptxas."""
    assemblers: tuple[str, ...] = ("",)
    hints: tuple[str, ...] = ()
    """Cache hints of :mod:`nostall.ptx.schedule.hints`."""
    dependent_launch: tuple[DependentLaunch, ...] = ("",)
    """Those with a trigger only if every kernel launched as a dependent of this one waits."""

    def values(self) -> Iterator[tuple[Lever, LeverValue]]:
        """Each field of the state that is a setting of the whole kernel, with each value."""
        yield from (("kernel_name", name) for name in self.kernel_names)
        yield from (("max_registers", count) for count in self.max_registers)
        yield from (("options", options) for options in self.options)
        yield from (("assembler", version) for version in self.assemblers)
        yield from (("dependent_launch", value) for value in self.dependent_launch)


NO_LEVERS = Levers()


def lever_value(state: PtxState, lever: Lever) -> LeverValue:
    """The value of a setting in ``state``."""
    value: LeverValue = getattr(state, lever)
    return value


def with_lever(state: PtxState, lever: Lever, value: LeverValue) -> PtxState:
    """The state with another value of a setting."""
    return replace(state, **{lever: value})  # type: ignore[arg-type]
