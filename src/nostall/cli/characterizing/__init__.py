"""Parts of ``nostall characterize``."""
