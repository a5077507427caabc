"""Special registers of PTX (PTX ISA 9.0, section 10)."""

from __future__ import annotations

import re
from types import MappingProxyType

from nostall.ptx.program.resources import DEVICE_FENCE, PURE, Effect

_CONSTANT = (
    "tid",
    "ntid",
    "laneid",
    "nwarpid",
    "ctaid",
    "nctaid",
    "nsmid",
    "gridid",
    "is_explicit_cluster",
    "clusterid",
    "nclusterid",
    "cluster_ctaid",
    "cluster_nctaid",
    "cluster_ctarank",
    "cluster_nctarank",
    "lanemask_eq",
    "lanemask_le",
    "lanemask_lt",
    "lanemask_ge",
    "lanemask_gt",
    "reserved_smem_offset_begin",
    "reserved_smem_offset_end",
    "reserved_smem_offset_cap",
    "total_smem_size",
    "aggr_smem_size",
    "dynamic_smem_size",
    "current_graph_exec",
)
"""Registers that keep one value while a thread runs."""
_CONSTANT_RANGES = ("envreg", "reserved_smem_offset_")
_CHANGING = (
    "clock",
    "clock_hi",
    "clock64",
    "globaltimer",
    "globaltimer_lo",
    "globaltimer_hi",
    "warpid",
    "smid",
)
"""Registers whose value depends on when they are read; their reads keep their order."""
_CHANGING_RANGES = ("pm",)

SPECIAL_REGISTERS: MappingProxyType[str, Effect] = MappingProxyType(
    dict.fromkeys(_CONSTANT, PURE) | dict.fromkeys(_CHANGING, DEVICE_FENCE)
)
_RANGES: MappingProxyType[str, Effect] = MappingProxyType(
    dict.fromkeys(_CONSTANT_RANGES, PURE) | dict.fromkeys(_CHANGING_RANGES, DEVICE_FENCE)
)
_NAME = re.compile(r"%([a-z_0-9]+?)(?:\.[xyzw])?$")
_NUMBERED = re.compile(r"([a-z_]+?)\d+(?:_64)?$")


def special_register(word: str) -> Effect | None:
    """The effect of a read of the special register ``word``; None if it is none that is known."""
    match = _NAME.match(word)
    if match is None:
        return None
    name = match.group(1)
    if name in SPECIAL_REGISTERS:
        return SPECIAL_REGISTERS[name]
    numbered = _NUMBERED.match(name)
    return _RANGES.get(numbered.group(1)) if numbered else None
