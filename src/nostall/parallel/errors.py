"""What can be wrong with a profile, a cluster or a plan.  All of it is bad input (exit code 2)."""

from __future__ import annotations

from nostall.core.errors import BadInput


class BadProfile(BadInput):
    """A model's profile cannot be read, or its numbers make no sense."""


class BadCluster(BadInput):
    """A cluster description cannot be read, or its GPUs cannot reach each other."""


class BadPlan(BadInput):
    """A plan does not fit its profile or its cluster."""


class Infeasible(BadInput):
    """No plan, or not this one, fits into the memory of the GPUs."""
