"""The front of the project: the headline numbers, their picture, and the texts that show them."""
