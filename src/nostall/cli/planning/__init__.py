"""Parts of ``nostall plan`` and ``nostall simulate``."""
