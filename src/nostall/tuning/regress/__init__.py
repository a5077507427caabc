"""What another compiler changed in a kernel, and a search for what it lost."""
