"""Points of pipelines on the GPUs of one host: models, plans, ranks, results."""
