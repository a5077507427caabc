"""Modelled cost of a sharding plan: compute, collectives and memory."""
