"""Kernel bodies of the schemes, one scheme or group of schemes a module."""
