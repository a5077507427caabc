"""PyTorch programs as operator graphs.  Needs PyTorch, as do `fuse` and the running of kernels."""

from nostall.fusion.capture.capture import Captured, Explanation, capture
from nostall.fusion.capture.trace import inference_graph, training_graphs

__all__ = ["Captured", "Explanation", "capture", "inference_graph", "training_graphs"]
