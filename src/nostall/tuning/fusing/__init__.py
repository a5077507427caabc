"""Fusion of a user's function as a job: trace, plan, generate, compile, verify, tune, keep."""
