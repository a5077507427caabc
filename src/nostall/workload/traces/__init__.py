"""Profiler traces: streamed from files into columns, in bounded memory."""
