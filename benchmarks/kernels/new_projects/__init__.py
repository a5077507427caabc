"""Triton kernels in the style of projects that no other file here uses."""
