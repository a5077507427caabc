"""Symbolic translation validation, block by block, with uninterpreted functions and time."""
