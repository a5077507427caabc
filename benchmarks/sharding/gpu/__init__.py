"""Sharding and hybrid plans on the GPUs of one host, beside PyTorch's peers."""
