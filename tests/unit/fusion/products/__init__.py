"""Tests of kernels that compute matrix products with their elementwise readers."""
