"""Effects of loads and stores, by their qualifiers."""

from __future__ import annotations

import re
from types import MappingProxyType

from nostall.ptx.program.resources import ALIGNED, DEVICE_FENCE, MEMORY, PURE, Effect, Resource

Qualifiers = tuple[str, ...]
"""The parts of an opcode after its first one, such as ("global", "v4", "b32")."""

_SPACE_RESOURCES = MappingProxyType(
    {
        "global": frozenset((Resource.GLOBAL,)),
        "shared": frozenset((Resource.SHARED,)),
        "local": frozenset((Resource.LOCAL,)),
        "param": frozenset((Resource.PARAM,)),
        "const": frozenset((Resource.STABLE,)),
    }
)
"""State space -> what its accesses touch; an address without a space may mean all of MEMORY."""


def touched_memory(qualifiers: Qualifiers) -> frozenset[Resource]:
    """The memory that an access with these qualifiers may touch."""
    if "nc" in qualifiers:
        return frozenset((Resource.STABLE,))
    for qualifier in qualifiers:
        space = qualifier.partition("::")[0]
        if space in _SPACE_RESOURCES:
            return _SPACE_RESOURCES[space]
    return MEMORY


_ACCESS_QUALIFIER = re.compile(
    r"weak|volatile|relaxed|acquire|release|mmio|cta|cluster|gpu|sys|nc|sync|aligned|load|store"
    r"|tensormap|(?:global|shared|local|param|const)(?:::\w+)?|L[12](?:::\w+)?|c[agsv]|lu|w[bt]|v[248]"
    r"|[busf]\d+(?:x\d+)?|bf16(?:x2)?|tf32|unified|m\d+n\d+(?:k\d+)?|x[124]|trans|row|col|[abcd]|b\dx\d+_p\d+"
)
"""Qualifiers of loads and stores that this table knows; another one makes them a fence."""


def _unknown_order(qualifiers: Qualifiers) -> Effect:
    known = all(_ACCESS_QUALIFIER.fullmatch(qualifier) for qualifier in qualifiers)
    return PURE if known else DEVICE_FENCE


def load(qualifiers: Qualifiers) -> Effect:
    """The effect of a load."""
    return Effect(reads=touched_memory(qualifiers)) | _unknown_order(qualifiers)


def store(qualifiers: Qualifiers) -> Effect:
    """The effect of a store."""
    return Effect(writes=touched_memory(qualifiers)) | _unknown_order(qualifiers)


def aligned_load(qualifiers: Qualifiers) -> Effect:
    """The effect of a load that all threads of a warp execute together."""
    return load(qualifiers) | ALIGNED


def aligned_store(qualifiers: Qualifiers) -> Effect:
    """The effect of a store that all threads of a warp execute together."""
    return store(qualifiers) | ALIGNED
