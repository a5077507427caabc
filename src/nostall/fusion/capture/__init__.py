"""Capture of PyTorch programs as operator graphs. Needs PyTorch."""

from nostall.fusion.capture.capture import CapturedGraph, CaptureReport, capture
from nostall.fusion.capture.trace import inference_graph, training_graphs

__all__ = ["CaptureReport", "CapturedGraph", "capture", "inference_graph", "training_graphs"]
