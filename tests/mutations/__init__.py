"""Seeded violations that the verifier has to refuse, and legal edits that it has to accept."""
