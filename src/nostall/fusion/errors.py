"""What can be wrong with an operator graph, a fusion plan or a program to capture (exit code 2)."""

from __future__ import annotations

from nostall.core.errors import BadInput


class BadGraph(BadInput):
    """An operator graph contradicts itself."""


class BadFusion(BadInput):
    """A set of operators cannot be one kernel, or a set of kernels is no plan of its graph."""


class BadCapture(BadInput):
    """A program cannot be taken apart into operators."""
