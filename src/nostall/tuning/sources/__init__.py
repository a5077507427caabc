"""Sources of kernels: Triton functions, PTX, cubin files, and the files that they are in."""
