"""Which kernels are wanted in a graph, and what became of them.

Apart from :mod:`~nostall.attach.torch_compile.rewrite.matching`, which finds them: a program that runs an earlier
choice need not import what writes kernels.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nostall.attach.torch_compile.options import Extent
from nostall.attach.torch_compile.store.records import RegionRecord


@dataclass(frozen=True)
class Part:
    """A kernel in terms of the whole graph.  ``key`` names the operators that it computes, whoever
    does that by whatever plan; ``kernel`` is one that does."""

    key: str
    kernel: str
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    operators: tuple[int, ...]
    reduces: bool


@dataclass
class Stitching:
    """What became of the graphs of one compilation: kernels put in, by name, and what was left to
    others, counted as (reason, operator)."""

    kernels: list[str] = field(default_factory=list)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)


@dataclass(frozen=True)
class Selection:
    """Which kernels are put in: by ``extent``, without the parts ``left`` (by key) to Inductor.
    ``regions`` (by name) are stitched like that, others as the store has them."""

    extent: Extent = "reductions"
    left: frozenset[str] = frozenset()
    regions: Mapping[str, RegionRecord] = field(default_factory=dict, hash=False)

    def takes(self, part: Part) -> bool:
        return (self.extent == "all" or part.reduces) and part.key not in self.left

    @property
    def name(self) -> list[Any]:
        """Whatever decides about the kernels."""
        regions = [f"{key} {record.json.decode()}" for key, record in self.regions.items()]
        text = "\n".join(sorted(regions))
        return [self.extent, sorted(self.left), hashlib.sha256(text.encode()).hexdigest()]
