"""Pipeline plans: where to cut a model, where each part runs, how often, and in which order."""
