"""Errors of the serving level: inputs that cannot be used (exit code 2)."""

from __future__ import annotations

from nostall.core.errors import BadInput


class BadBatch(BadInput):
    """A ragged batch contradicts itself, or a batch file cannot be read."""


class BadTables(BadInput):
    """Settings of the task tables contradict each other, or a cost table cannot be read."""


class CapacityExceeded(BadTables):
    """A batch needs larger tables than those allocated; the message names the capacity needed."""


class BadPlan(BadInput):
    """A stored plan of attention cannot be read."""


class BadSchedule(BadInput):
    """Limits or a policy of the scheduler, or step costs of the simulator, cannot be used."""
