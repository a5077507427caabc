"""Long and damaged runs: kills, soaks, damaged cubins."""
