"""nostall: finds where a deep-learning program waits, and takes the wait out."""

__version__ = "0.1.0"
