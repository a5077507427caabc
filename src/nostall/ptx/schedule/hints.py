"""Cache hints of memory accesses: qualifiers that change no value (PTX ISA 9.0, section 9.7.9)."""

from __future__ import annotations

from types import MappingProxyType

from nostall.ptx.program.instruction import Instruction
from nostall.ptx.schedule.edits import Edit

PREFETCH_HINTS = ("L2::64B", "L2::128B", "L2::256B")
"""Bytes that L2 fetches around an access that misses."""
EVICTION_HINTS = ("L1::evict_first", "L1::evict_last", "L1::evict_unchanged", "L1::no_allocate")
"""Priority of the line in L1."""
HINTS = PREFETCH_HINTS + EVICTION_HINTS

_ALLOWED: MappingProxyType[str, tuple[str, ...]] = MappingProxyType(
    {"ld": PREFETCH_HINTS + EVICTION_HINTS, "st": EVICTION_HINTS, "cp": PREFETCH_HINTS}
)
"""Opcode -> hints that its grammar has."""
_KNOWN = frozenset(
    ("async", "weak", "ca", "cg", "shared", "shared::cta", "global", "nc", "v2", "v4", "v8")
)
"""Qualifiers beside which a hint is allowed; the others stand in other forms of the grammar."""
_ORDERED = frozenset(("ca", "cg"))
"""Cache operators: a load that has one takes no eviction priority."""


def allowed_hints(instruction: Instruction) -> tuple[str, ...]:
    """Hints that the instruction may get: none unless it accesses global memory and has none."""
    start, end = instruction.opcode_span
    if end - start != len(instruction.opcode):  # white space inside
        return ()
    *qualifiers, last = instruction.qualifiers or ("",)
    if instruction.base == "cp":
        is_copy = instruction.opcode.startswith("cp.async.c") and last == "global"
        return _ALLOWED["cp"] if is_copy and _KNOWN.issuperset(qualifiers) else ()
    if "global" not in qualifiers or not _KNOWN.issuperset(qualifiers):
        return ()
    if _ORDERED & set(qualifiers):
        return ()
    return _ALLOWED.get(instruction.base, ())


def hint_edit(instruction: Instruction, hint: str) -> Edit:
    """The insertion of ``hint`` into the opcode of ``instruction``.

    An eviction priority follows the state space; a prefetch size precedes the vector and the type.
    """
    after = {"global", "nc"}
    if hint in PREFETCH_HINTS:
        after |= {"shared", "shared::cta", "async", "ca", "cg"}
    length = len(instruction.base)
    end = length
    for qualifier in instruction.qualifiers:
        length += 1 + len(qualifier)
        if qualifier in after:
            end = length
    place = instruction.opcode_span[0] + end
    return Edit(place, place, f".{hint}")
