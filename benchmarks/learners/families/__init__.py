"""Families of models of random size, by kind of work."""
