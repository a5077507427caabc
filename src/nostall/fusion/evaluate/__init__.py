"""What kernels and plans cost; every time here is *modelled*."""

from nostall.fusion.evaluate.delta import Delta, DeltaObjective
from nostall.fusion.evaluate.hardware import H200, Hardware
from nostall.fusion.evaluate.latency import Latency, LatencyObjective

__all__ = ["H200", "Delta", "DeltaObjective", "Hardware", "Latency", "LatencyObjective"]
