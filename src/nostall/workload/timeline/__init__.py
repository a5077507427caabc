"""Measured analysis of traces: GPU time by kind of work, causes of idle time, bottlenecks."""
