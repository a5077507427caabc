"""A corpus of kernels compiled by Triton and nvcc, on which the SASS level is tested."""
