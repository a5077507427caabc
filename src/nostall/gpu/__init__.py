"""Everything that touches a GPU: candidates are checked and timed in a process of their own."""

from nostall.gpu.device import Device, Kernel, Outcome, Plan, Timing
from nostall.gpu.recorded import Recording, Replay
from nostall.gpu.worker import LocalGpu

__all__ = ["Device", "Kernel", "LocalGpu", "Outcome", "Plan", "Recording", "Replay", "Timing"]
