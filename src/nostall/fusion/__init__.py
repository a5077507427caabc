"""Fusion of memory-intensive PyTorch operators into Triton kernels (FusionStitching)."""

from typing import TYPE_CHECKING

from nostall.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from nostall.fusion.errors import BadCapture, BadFusion, BadGraph
    from nostall.fusion.graph.builder import Builder
    from nostall.fusion.graph.graph import Graph, Node
    from nostall.fusion.graph.operations import OPERATIONS, Operation

__all__ = [
    "OPERATIONS",
    "BadCapture",
    "BadFusion",
    "BadGraph",
    "Builder",
    "Graph",
    "Node",
    "Operation",
]

__getattr__ = lazy_exports(
    __name__,
    __all__,
    "errors",
    "graph.operations",
    "graph.graph",
    "graph.builder",
)
