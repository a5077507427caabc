"""Fusion of memory-intensive operators: which of them become one kernel, and at what cost."""

from typing import TYPE_CHECKING

from nostall.core.exports import among

if TYPE_CHECKING:
    from nostall.fusion.build import Builder
    from nostall.fusion.errors import BadCapture, BadFusion, BadGraph
    from nostall.fusion.graph import Graph, Node
    from nostall.fusion.operations import OPERATIONS, Operation

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

__getattr__ = among(
    __name__,
    __all__,
    "errors",
    "operations",
    "graph",
    "build",
)
