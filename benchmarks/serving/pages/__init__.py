"""The parts of the page on serving."""
