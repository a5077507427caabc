"""Kernels written from the text of public reports of slower compilers."""
