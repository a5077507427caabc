"""Search over orders: proposals, pipelines of objectives, and the strategy of random orders."""
