"""Issue distances of sm_90, measured on a GPU, and witnesses of orders."""
