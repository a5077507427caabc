"""The commands ``nostall serving``."""
