"""Planners of shardings: an integer program over tied layers, and baselines of one rule each."""
