"""Benchmarks of the serving level: attention and GEMM for batches that change every step."""
