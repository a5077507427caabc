"""HTML report of a run of ``nostall tune``."""
