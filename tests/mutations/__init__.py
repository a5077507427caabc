"""Seeded violations that the verifier must reject, and legal edits that it must accept."""
