"""Matrix products with the elementwise operators around them, as one Triton kernel."""
