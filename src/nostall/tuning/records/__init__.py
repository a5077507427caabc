"""Records of tuning: JSON of a result, summaries of runs, and records of the store."""
