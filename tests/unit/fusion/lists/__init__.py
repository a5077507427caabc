"""Tests of kernels over lists of tensors."""
