"""The command ``nostall fuse`` and its terminal output."""
