"""Benchmarks of single mechanisms of the kernels of chains: memory, seeds, starts, PDL."""
