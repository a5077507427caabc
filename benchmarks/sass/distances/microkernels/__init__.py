"""Micro-kernels for sm_90: words, windows and kernels as pure functions."""
