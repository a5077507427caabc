"""Seeded violations that the PTX validator must refuse, and legal edits that it must accept."""
