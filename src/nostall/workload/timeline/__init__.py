"""What a trace measured: where a GPU's time went, and what to fix first."""
