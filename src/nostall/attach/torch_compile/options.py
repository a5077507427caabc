"""What a user may say to the backend: ``options={"nostall.…": …}``; the rest is Inductor's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from nostall.core.errors import BadInput

PREFIX = "nostall."
Extent = Literal["reductions", "all"]
"""Which kernels are put in: those with reductions (a chain of elementwise operators is what
Inductor does well, and can hide in its matrix products), or all."""
Choose = Literal["measure", "stitched", "inductor"]
Rest = Literal["inductor", "eager"]
Keep = Literal["faster", "all"]
RACED = 4
"""Fewer than a :class:`~nostall.fusion.codegen.autotune.autotuner.Autotuner` takes by itself: the program waits for
the race."""


@dataclass(frozen=True)
class Settings:
    """``extent``: which kernels are put in.  ``choose``: by measurement, or always the same.
    ``background``: stitch regions elsewhere while Inductor's version runs.  ``seconds``: about
    how long a comparison may take.  ``rest``: who compiles what is not stitched.  ``race``: how
    many of the modelled best plans of each kernel are measured before that beside the best of every
    scheme, 0 for no race.  ``keep``: of the kernels those that are measured to be faster than what
    Inductor makes of the same operators, or all."""

    extent: Extent = "reductions"
    choose: Choose = "measure"
    background: bool = True
    seconds: float = 1.0
    rest: Rest = "inductor"
    race: int = RACED
    keep: Keep = "faster"

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for one in fields(self):
            value, wanted = getattr(self, one.name), hints[one.name]
            allowed = get_args(wanted)
            fits = value in allowed if allowed else type(value) in _kinds(wanted)
            if fits and wanted in (int, float):
                fits = value > 0 or (wanted is int and value == 0)
            if not fits:
                said = " or ".join(map(repr, allowed)) or {
                    bool: "True or False",
                    int: "a whole number from 0 on",
                }.get(wanted, "a number above 0")
                raise BadInput(f"option {PREFIX}{one.name} is {value!r}; give {said}")


def _kinds(wanted: type) -> tuple[type, ...]:
    return (int, float) if wanted is float else (wanted,)


def settings_of(options: Mapping[str, Any] | None) -> tuple[Settings, dict[str, Any]]:
    """Our settings, and the options that are for Inductor.  Raises :class:`BadInput`."""
    ours: dict[str, Any] = {}
    others: dict[str, Any] = {}
    known = [one.name for one in fields(Settings)]
    for name, value in (options or {}).items():
        if not name.startswith(PREFIX):
            others[name] = value
        elif (short := name.removeprefix(PREFIX)) in known:
            ours[short] = value
        else:
            raise BadInput(
                f"option {name} is not known; known are {', '.join(PREFIX + k for k in known)}, "
                "and those of Inductor"
            )
    return Settings(**ours), others
