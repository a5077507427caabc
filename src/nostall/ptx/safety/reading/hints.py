"""Cache hints that a candidate may add, change or remove.

PTX ISA 9.7.9 calls them performance hints: eviction priorities and the size of an L2 prefetch.
They are allowed on weak loads and stores with an explicit ``.global``, and the prefetch size also
on ``cp.async``: with a generic address that is not global the prefetch is undefined.  The cache
operators ``.ca``, ``.cg``, ``.cv``, ``.lu`` and ``.wt`` select where data are kept and how fresh
they are, so they belong to the instruction.
"""

from __future__ import annotations

_PREFETCH = frozenset({"L2::64B", "L2::128B", "L2::256B"})
_EVICTION = frozenset(
    {
        "L1::evict_normal",
        "L1::evict_unchanged",
        "L1::evict_first",
        "L1::evict_last",
        "L1::no_allocate",
        "L2::evict_normal",
        "L2::evict_first",
        "L2::evict_last",
    }
)
_STRONG = frozenset({"volatile", "relaxed", "acquire", "release", "mmio", "async", "bulk"})


def split_hints(opcode: str) -> tuple[str, str]:
    """(opcode without the hints that may differ, these hints joined by dots)."""
    if "L1::" not in opcode and "L2::" not in opcode:
        return opcode, ""
    root, *modifiers = opcode.split(".")
    allowed = _allowed_hints(root, frozenset(modifiers))
    kept = [m for m in modifiers if m not in allowed]
    hints = [m for m in modifiers if m in allowed]
    return ".".join((root, *kept)), ".".join(hints)


def _allowed_hints(root: str, modifiers: frozenset[str]) -> frozenset[str]:
    if root in ("ld", "st") and "global" in modifiers and not modifiers & _STRONG:
        return _PREFETCH | _EVICTION
    if root == "cp" and {"async", "global"} <= modifiers and "bulk" not in modifiers:
        return _PREFETCH
    return frozenset()
