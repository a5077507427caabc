"""Everything that touches a GPU: candidates are checked and timed in a process of their own."""

from typing import TYPE_CHECKING

from nostall.core.exports import among

if TYPE_CHECKING:
    from nostall.gpu.device import (
        CLOCKS,
        Clock,
        Device,
        Kernel,
        Outcome,
        Overlapping,
        Pending,
        Plan,
        Timing,
    )
    from nostall.gpu.replayed_device import Recording, Replay
    from nostall.gpu.worker import LocalGpu

__all__ = [
    "CLOCKS",
    "Clock",
    "Device",
    "Kernel",
    "LocalGpu",
    "Outcome",
    "Overlapping",
    "Pending",
    "Plan",
    "Recording",
    "Replay",
    "Timing",
]

__getattr__ = among(
    __name__,
    __all__,
    "device",
    "replayed_device",
    "worker",
)
