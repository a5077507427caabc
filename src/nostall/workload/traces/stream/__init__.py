"""Event lists of trace files as a stream: text blocks, cuts between events, damaged text."""
