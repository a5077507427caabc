"""Hybrid plans: pipeline stages whose tensors are sharded over the GPUs of their stage."""
