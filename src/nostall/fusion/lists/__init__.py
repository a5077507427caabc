"""Kernels over lists of tensors: equal pointwise expressions, and norms, of many tensors at once."""
