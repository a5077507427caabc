"""Parts of the commands ``nostall serving``."""
