"""One number for every architectural register that a dependence can run through.

General registers 0..255, uniform registers 256..383, predicates 384..391, uniform predicates
392..399.  RZ, URZ, PT and UPT are constants and have no number.
"""

from __future__ import annotations

COUNT = 400
_BASE = {"R": 0, "UR": 256, "P": 384, "UP": 392}
_SIZE = {"R": 255, "UR": 127, "P": 7, "UP": 7}
ALL = tuple(_BASE[file] + index for file, size in _SIZE.items() for index in range(size))
"""Every number that a register has."""


def number(file: str, index: int) -> int:
    """The number of register ``index`` in ``file`` (R, UR, P or UP)."""
    if not 0 <= index < _SIZE[file]:
        raise ValueError(f"register {file}{index}: {file} has indices 0..{_SIZE[file] - 1}")
    return _BASE[file] + index


def name(register: int) -> str:
    """The inverse of :func:`number`, as nvdisasm spells it."""
    file = "UP" if register >= 392 else "P" if register >= 384 else "UR" if register >= 256 else "R"
    return f"{file}{register - _BASE[file]}"


def is_uniform(register: int) -> bool:
    return 256 <= register < 384 or register >= 392


def is_predicate(register: int) -> bool:
    return register >= 384
