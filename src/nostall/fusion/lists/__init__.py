"""Kernels over lists of tensors: one expression, or the norms, of many tensors."""
