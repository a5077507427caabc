"""What can be wrong with a profile, cluster, plan or module (exit code 2), or with a run (3)."""

from __future__ import annotations

from typing import ClassVar

from nostall.core.errors import BadInput, NostallError


class BadProfile(BadInput):
    """A model's profile cannot be read, or its numbers make no sense."""


class BadCluster(BadInput):
    """A cluster description cannot be read, or its GPUs cannot reach each other."""


class BadPlan(BadInput):
    """A plan does not fit its profile or its cluster."""


class Infeasible(BadInput):
    """No plan, or not this one, fits into the memory of the GPUs."""


class BadModel(BadInput):
    """A module cannot be taken apart into stages, or the file that names it is not usable."""


class RunFailed(NostallError):
    """A run of a plan ended early: a process died, or one waited longer than it may."""

    exit_code: ClassVar[int] = 3
