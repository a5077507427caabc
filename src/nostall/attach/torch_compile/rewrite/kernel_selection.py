"""Which kernels may be inserted into a graph, and what became of the rest.

These types are separate from :mod:`~nostall.attach.torch_compile.rewrite.matching`, which finds the
kernels: a process with a stored selection does not have to import the code generator.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nostall.attach.torch_compile.options import FuseScope
from nostall.attach.torch_compile.store.records import RegionRecord

if TYPE_CHECKING:
    from nostall.fusion.graph.graph import Graph


PRODUCTS_ONLY = "this candidate has kernels of matrix products only"
"""Reason why other kernels are not inserted."""


@dataclass(frozen=True)
class KernelMatch:
    """A kernel and the operators of a graph that it can replace; integers are the graph's nodes."""

    # Hash of the operators in their region; does not depend on the kernel's plan.
    key: str
    # Name of the kernel's record.
    kernel: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    operators: tuple[int, ...]
    # Whether it has a reduction, or a matrix product with other operators.
    reduces: bool


def match_key(region: str, operators: tuple[int, ...]) -> str:
    """The key of the kernel of some operators of a region; ``region`` is the key of its graph."""
    return hashlib.sha256(f"{region} {operators}".encode()).hexdigest()


@dataclass
class RewriteResult:
    """Result of rewriting the graphs of one compilation; filled in while they are rewritten."""

    # Names of the inserted kernels, in the order of the graphs.
    kernels: list[str] = field(default_factory=list)
    # Operators that are not part of a kernel, counted by (reason, operator).
    not_fused: Counter[tuple[str, str]] = field(default_factory=Counter)
    # What keeps each graph from being fused further, as lines of text.
    explanations: list[list[str]] = field(default_factory=list)
    # The regions of the graphs, and their kernels.
    regions: list[tuple[Graph, RegionRecord]] = field(default_factory=list)


@dataclass(frozen=True)
class KernelFilter:
    """Which kernel matches are inserted, and the kernels of regions that are already chosen."""

    fuse: FuseScope = "reductions"
    # Keys of matches that stay with Inductor.
    kept_in_inductor: frozenset[str] = frozenset()
    # Kernels by region key; other regions are taken from the store.
    regions: Mapping[str, RegionRecord] = field(default_factory=dict, hash=False)
    # Whether ``regions`` may have kernels of matrix products.
    products: bool = False
    # Whether all other kernels stay with Inductor.
    products_only: bool = False
    # Whether all kernels stay with Inductor, those over lists, too.
    nothing: bool = False

    def accepts(self, match: KernelMatch) -> bool:
        return (self.fuse == "all" or match.reduces) and match.key not in self.kept_in_inductor

    @property
    def cache_key(self) -> list[Any]:
        """Everything that decides which kernels are inserted, for PyTorch's cache keys."""
        regions = [f"{key} {record.json.decode()}" for key, record in self.regions.items()]
        text = "\n".join(sorted(regions))
        digest = hashlib.sha256(text.encode()).hexdigest()
        kept = sorted(self.kept_in_inductor)
        return [self.fuse, kept, digest, self.products, self.products_only, self.nothing]
