"""How fast attention is beside other kernels, and with prefix groups."""
