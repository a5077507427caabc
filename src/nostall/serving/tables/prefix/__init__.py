"""Prefixes that sequences share: found in block tables, arranged as a forest, read once."""
