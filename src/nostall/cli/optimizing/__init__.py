"""The command ``nostall optimize``."""
