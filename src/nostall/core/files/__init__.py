"""Files: atomic writes, locks of folders, and text in blocks."""
