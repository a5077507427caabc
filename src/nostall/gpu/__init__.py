"""Check and time candidates of a kernel on a GPU, in a separate process."""

from typing import TYPE_CHECKING

from nostall.core.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from nostall.gpu.device import (
        TIMING_METHODS,
        AsyncDevice,
        Device,
        Kernel,
        MeasurementPlan,
        Outcome,
        PendingOutcome,
        Timing,
        TimingMethod,
    )
    from nostall.gpu.worker import LocalGpu

__all__ = [
    "TIMING_METHODS",
    "AsyncDevice",
    "Device",
    "Kernel",
    "LocalGpu",
    "MeasurementPlan",
    "Outcome",
    "PendingOutcome",
    "Timing",
    "TimingMethod",
]

__getattr__ = lazy_exports(
    __name__,
    __all__,
    "device",
    "worker",
)
