"""Functions, blocks and instructions of a PTX module, with their effects."""
