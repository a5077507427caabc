"""Evaluators: the modelled time of kernels and partitions."""

from nostall.fusion.evaluate.delta import DeltaEvaluator, DeltaObjective
from nostall.fusion.evaluate.latency import LatencyEvaluator, LatencyObjective
from nostall.fusion.hardware import H200

__all__ = [
    "H200",
    "DeltaEvaluator",
    "DeltaObjective",
    "LatencyEvaluator",
    "LatencyObjective",
]
