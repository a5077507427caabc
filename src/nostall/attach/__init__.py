"""Ways for a user's program to use optimised cubins: decorator, environment and loader.

Imports nothing, because a worker that only looks up the store must not import the tuner.
"""
