"""CuAsmRL: its network and its search, as published (arXiv:2501.08071)."""
