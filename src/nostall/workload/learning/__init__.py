"""Bayesian learners that label kernels, jobs and traces, and find kinds that nobody labelled.

Needs the extra ``nostall[learn]``.
"""
