"""Versions of other people's software that nostall was made for."""

from __future__ import annotations

TRITON_VERSIONS = ("3.6", "3.7", "3.8", "3.9")


def knows_triton(version: str) -> bool:
    """Whether ``version`` (such as ``3.9.0``) is of a series that nostall was made for."""
    return ".".join(version.split(".")[:2]) in TRITON_VERSIONS
