"""Semantics of graphs in numpy, and Triton's and Gluon's interpreters, for tests and benchmarks."""
