"""Hardware descriptions: peak rates with their sources, and the efficiency that work reaches."""
