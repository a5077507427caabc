"""Serving kernels for batches that change every step, after XY-Serve (arXiv:2412.18106).

A serving step mixes prefill chunks, decodes and speculative verifies. ``batch`` describes one step,
``tables`` cuts it into units of a few tile heights and distributes them over programs.
"""
