"""vLLM with nostall's plug-in, and the simulated engine."""
