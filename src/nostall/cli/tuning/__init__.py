"""The commands ``nostall tune`` and ``nostall train``."""
