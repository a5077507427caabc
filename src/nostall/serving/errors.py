"""Errors of the serving level: inputs that cannot be used (exit code 2)."""

from __future__ import annotations

from nostall.core.errors import BadInput, MissingPart


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


def current_gpu() -> str:
    """Name of the current GPU.  Raises :class:`MissingPart` without one."""
    import torch

    if not torch.cuda.is_available():
        raise MissingPart("no GPU is present; run this command on the GPU that will serve")
    return str(torch.cuda.get_device_name())
