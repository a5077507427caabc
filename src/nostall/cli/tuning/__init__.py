"""Parts of ``nostall tune``."""
