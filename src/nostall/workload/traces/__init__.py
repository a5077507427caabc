"""Readers for profiler traces (Kineto, Chakra) that stream files in bounded memory."""
