"""Random walks of legal moves over corpus kernels, prepared on a CPU and executed on a GPU."""
