"""Errors of ``nostall.parallel``: rejected inputs (exit code 2) and failed runs (exit code 3)."""

from __future__ import annotations

from typing import ClassVar

from nostall.core.errors import BadInput, NostallError


class BadProfile(BadInput):
    """A profile of a model cannot be read, or a number in it is not allowed."""


class BadCluster(BadInput):
    """A cluster description cannot be read, or some of its GPUs are not connected."""


class BadPlan(BadInput):
    """A plan does not match its profile or its cluster, or cannot be run as requested."""


class Infeasible(BadInput):
    """No plan fits into the memory of the GPUs, or the plan that is evaluated does not fit."""


class BadModel(BadInput):
    """A PyTorch module cannot be split into stages, or the file that builds it is not usable."""


class CaptureFailed(NostallError):
    """A step cannot be captured as a CUDA graph on at least one rank."""

    exit_code: ClassVar[int] = 3


class RunFailed(NostallError):
    """A run of a plan ended early: a rank failed or waited longer than its deadline."""

    exit_code: ClassVar[int] = 3


class BadCheckpoint(BadInput):
    """A checkpoint is not complete, cannot be written or read, or is of another model."""
