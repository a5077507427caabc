"""PyTorch programs as operator graphs.  Needs PyTorch; nothing else in ``nostall.fusion`` does."""

from nostall.fusion.capture.capture import Captured, Explanation, capture
from nostall.fusion.capture.trace import inference_graph, training_graphs

__all__ = ["Captured", "Explanation", "capture", "inference_graph", "training_graphs"]
