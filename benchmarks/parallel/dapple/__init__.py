"""DAPPLE's published plans and formulas (arXiv:2007.01045), computed again."""
