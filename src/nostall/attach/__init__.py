"""How a user's stack picks results up: a decorator, an environment, a loader.

Nothing is imported here: a worker that only asks the store must not pay for a tuner.
"""
