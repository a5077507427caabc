"""Reader of the traces that torch.profiler writes (Kineto)."""
