"""Evaluators: the modelled time of kernels and partitions."""
