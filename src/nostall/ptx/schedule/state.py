"""A state of the PTX search: the order of each block, and what the assembler is told; immutable."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from nostall.core.errors import BadRun
from nostall.core.validation import parse_json

DependentLaunch = Literal["", "wait", "wait+trigger", "trigger+wait"]
"""Values of :mod:`nostall.ptx.schedule.dependent_launch`."""
_DEPENDENT_LAUNCH: dict[str, DependentLaunch] = {v: v for v in get_args(DependentLaunch)}
Orders = tuple[tuple[int, ...], ...]
"""Per block, the original index of the unit at each position; () is the original order."""
Hints = tuple[tuple[int, str], ...]
"""Pairs (index of an instruction of the kernel, hint), sorted by index."""


@dataclass(frozen=True)
class PtxState:
    """One way to give a kernel to ptxas. The default is the original text and options."""

    orders: Orders = ()
    """() if no unit moved; otherwise one entry for each block of the space."""
    kernel_name: str = ""
    """New name of the kernel; "" keeps its name."""
    max_registers: int | None = None
    """Most registers a thread, as a ``.maxnreg`` directive; None keeps the original's limits."""
    options: tuple[str, ...] = ()
    """Options for ptxas beside those of the compiler."""
    assembler: str = ""
    """Version of ptxas; "" is the default one."""
    hints: Hints = ()
    dependent_launch: DependentLaunch = ""
    """Instructions for programmatic dependent launch that are inserted."""

    def dump(self) -> str:
        """The state as one line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    def key(self) -> bytes:
        """A hash of 16 bytes that identifies the state."""
        return hashlib.blake2b(self.dump().encode(), digest_size=16).digest()

    @classmethod
    def load(cls, text: str) -> PtxState:
        """Read the text of :meth:`dump`.

        Raises :class:`BadRun` if the text is damaged.
        """
        try:
            fields = parse_json(text)
            return cls(
                orders=tuple(tuple(map(int, order)) for order in fields["orders"]),
                kernel_name=str(fields["kernel_name"]),
                max_registers=_optional_int(fields["max_registers"]),
                options=tuple(map(str, fields["options"])),
                assembler=str(fields["assembler"]),
                hints=tuple((int(index), str(hint)) for index, hint in fields["hints"]),
                dependent_launch=_DEPENDENT_LAUNCH[fields["dependent_launch"]],
            )
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise BadRun(
                f"the saved PTX state {text[:60]!r} cannot be read ({error}); start a new run"
            ) from error


def _optional_int(value: object) -> int | None:
    return None if value is None else int(str(value))
