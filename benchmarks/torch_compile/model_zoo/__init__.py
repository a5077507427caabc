"""Models of the benchmarks of torch.compile: parts of published models, and models of users."""
