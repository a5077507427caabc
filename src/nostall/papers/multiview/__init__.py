"""Max-margin multi-view classifier with an adaptive kernel (the model of arXiv:1910.05250).

Only the abstract of the paper was available.  The model is the one that the abstract names; priors
and samplers are derived here.
"""
