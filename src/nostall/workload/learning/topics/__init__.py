"""Topic model that labels known categories and infers how many new ones there are.

Implements the model of arXiv:1910.04420, of which only the abstract was available: a hierarchical
Dirichlet process whose categories are known or new.  Priors and samplers are derived here.
"""
