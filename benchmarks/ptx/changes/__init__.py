"""Legal changes of PTX: the freedom of its order, and an exact change of its instructions."""
