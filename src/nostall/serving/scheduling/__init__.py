"""Scheduling of serving steps: policies for the token budget, and the prefix tree of blocks."""
