"""Ragged batches of one serving step: lengths, pages, tree masks, files and examples."""
