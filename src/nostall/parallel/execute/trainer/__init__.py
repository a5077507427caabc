"""Training by a plan in the user's own loop; ``nostall.parallel.build`` is the public face."""
