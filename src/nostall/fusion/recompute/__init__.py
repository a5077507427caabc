"""Kernels that compute a value again instead of reading it from memory."""
