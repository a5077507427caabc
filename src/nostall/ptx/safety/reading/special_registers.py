"""Special registers of PTX (PTX ISA 9.4, chapter 10)."""

from __future__ import annotations

import re

_CONSTANT = re.compile(
    r"""%(?:tid|ntid|laneid|nwarpid|ctaid|nctaid|nsmid|gridid|is_explicit_cluster|clusterid
    |nclusterid|cluster_ctaid|cluster_nctaid|cluster_ctarank|cluster_nctarank
    |lanemask_(?:eq|le|lt|ge|gt)|envreg\d+|reserved_smem_offset_(?:begin|end|cap|\d+)
    |total_smem_size|aggr_smem_size|dynamic_smem_size|current_graph_exec)""",
    re.VERBOSE,
)
_VOLATILE = re.compile(
    r"%(?:warpid|smid|clock|clock_hi|clock64|pm\d+(?:_64)?|globaltimer(?:_lo|_hi)?)"
)
"""Registers whose value may change while a thread runs."""


def is_special(name: str) -> bool:
    """Whether a name is that of a special register."""
    return (_CONSTANT.fullmatch(name) or _VOLATILE.fullmatch(name)) is not None


def is_volatile(name: str) -> bool:
    """Whether the register may change while a thread runs, so that reads of it keep their order."""
    return _VOLATILE.fullmatch(name) is not None
