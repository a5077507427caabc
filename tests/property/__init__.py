"""Properties that hold for every state and every move."""
