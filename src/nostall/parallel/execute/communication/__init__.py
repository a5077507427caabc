"""Communication between ranks: process groups, messages over boundaries, gradient all-reduces."""
