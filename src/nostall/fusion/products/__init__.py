"""Matrix products with the elementwise operators that read them, as one Triton kernel."""
