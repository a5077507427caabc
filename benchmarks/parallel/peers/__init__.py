"""Captured plans beside PyTorch's engines, eager, compiled and captured, on GPUs of one host."""
