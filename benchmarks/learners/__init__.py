"""Benchmarks of the learners, and the corpus of operator documents that they use."""
