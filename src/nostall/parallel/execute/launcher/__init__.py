"""Processes of a run: the launcher, the worker of each rank, and the cause of a failure."""
