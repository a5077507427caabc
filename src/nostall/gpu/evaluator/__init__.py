"""Evaluator of candidates in the worker process: loads, checks and times them on its GPU."""
