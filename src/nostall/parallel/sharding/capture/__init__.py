"""Capture of a training step: its operators, and the strategies by which a mesh can run each."""
