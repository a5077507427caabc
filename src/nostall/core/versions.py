"""Versions of Triton that nostall supports."""

from __future__ import annotations

TRITON_VERSIONS = ("3.6", "3.7", "3.8", "3.9")


def supports_triton(version: str) -> bool:
    """Whether nostall supports this Triton version (such as ``3.9.0``), by major and minor."""
    return ".".join(version.split(".")[:2]) in TRITON_VERSIONS
