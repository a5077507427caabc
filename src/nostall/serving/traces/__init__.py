"""Request traces of serving systems: arrival times, prompt and output lengths, prefix hashes."""
