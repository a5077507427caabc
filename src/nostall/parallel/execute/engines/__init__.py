"""Engines: one rank's passes and messages in each iteration of a pipeline plan."""
