"""Evolutionary search: operators, a bandit that chooses them, a population, and the strategy."""
