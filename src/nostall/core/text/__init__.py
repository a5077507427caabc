"""Text of messages: plurals, suggestions of names, and text that is safe for a terminal."""
