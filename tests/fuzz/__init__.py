"""Damaged inputs: they cost one clear error, never a crash, memory or time."""
