"""Benchmarks of the PTX level: what searching the input of ptxas gains."""
