"""Patterns become Triton kernels: loops, rows and columns, plans, source, launch."""
