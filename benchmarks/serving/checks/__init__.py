"""Whether the kernels are right, and what they compile to."""
