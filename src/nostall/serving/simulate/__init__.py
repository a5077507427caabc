"""Simulation of a serving engine: requests of a trace, a policy, and measured costs of steps."""
