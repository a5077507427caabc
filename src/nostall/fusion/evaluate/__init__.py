"""What kernels and plans cost; every time here is *modelled*."""

from nostall.fusion.evaluate.delta import Delta, DeltaObjective
from nostall.fusion.evaluate.latency import Latency, LatencyObjective
from nostall.fusion.hardware import H200, Hardware

__all__ = ["H200", "Delta", "DeltaObjective", "Hardware", "Latency", "LatencyObjective"]
