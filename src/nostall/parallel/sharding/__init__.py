"""Sharding plans: the placement of each tensor of a training step on a mesh of GPUs.

``capture`` traces a job to a graph of operators with their strategies, ``cost`` prices a plan on a
cluster, and ``planners`` search for the plan with the least modelled time.
"""
