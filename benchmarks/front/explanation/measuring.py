"""Figures of ``docs/explanation/measuring.md``."""

from __future__ import annotations

from benchmarks.front.levels import native_schedules


def figures() -> dict[str, str]:
    """Name -> text."""
    return {"native-mean": f"{native_schedules().mean:.3f}"}
