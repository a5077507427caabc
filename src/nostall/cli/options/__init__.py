"""Options that several commands share, and the inputs that they select."""
