"""Dask preload module: workers ignore Ctrl-C, which the process that uses them handles."""

from __future__ import annotations

import signal


def dask_setup(worker: object) -> None:
    """Ignore SIGINT; Dask calls this in the worker's main thread before the worker takes work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
