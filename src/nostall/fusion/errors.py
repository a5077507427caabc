"""Errors of fusion: invalid graphs, partitions and programs to capture (exit code 2)."""

from __future__ import annotations

from nostall.core.errors import BadInput


class BadGraph(BadInput):
    """An operator graph is inconsistent."""


class BadFusion(BadInput):
    """A set of operators cannot be one kernel, or a set of kernels is no partition of its graph."""


class BadCapture(BadInput):
    """A PyTorch program cannot be captured as an operator graph."""
