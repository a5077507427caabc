"""Register numbers: one integer for each register that can carry a dependence.

General registers have numbers 0 to 254, uniform registers 256 to 382, predicates 384 to 390 and
uniform predicates 392 to 398.  RZ, URZ, PT and UPT are constants and have no number.
"""

from __future__ import annotations

COUNT = 400
"""All register numbers are below this."""
_BASE = {"R": 0, "UR": 256, "P": 384, "UP": 392}
_SIZE = {"R": 255, "UR": 127, "P": 7, "UP": 7}
ALL = tuple(_BASE[file] + index for file, size in _SIZE.items() for index in range(size))
"""All register numbers."""


def number(file: str, index: int) -> int:
    """The number of register ``index`` of ``file`` (R, UR, P or UP)."""
    if not 0 <= index < _SIZE[file]:
        raise ValueError(
            f"register {file}{index} does not exist; {file} has indices 0 to {_SIZE[file] - 1}"
        )
    return _BASE[file] + index


def name(register: int) -> str:
    """The name of a register number in nvdisasm's spelling: the inverse of :func:`number`."""
    file = "UP" if register >= 392 else "P" if register >= 384 else "UR" if register >= 256 else "R"
    return f"{file}{register - _BASE[file]}"


def is_uniform(register: int) -> bool:
    """Whether the number is of a uniform register or a uniform predicate."""
    return 256 <= register < 384 or register >= 392


def is_predicate(register: int) -> bool:
    """Whether the number is of a predicate or a uniform predicate."""
    return register >= 384
