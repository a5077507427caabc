"""Whole programs: watch one, try changes on its own steps, keep what is proven.

``job`` directs the program through ``program``; ``diagnosis`` bounds what each level can gain, and
``proof`` decides from measured blocks.  What runs inside the program is in ``attach.program``.
"""
