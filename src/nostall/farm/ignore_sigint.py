"""A Dask preload: the worker does not hear Ctrl-C, whoever uses it does and tells it what to do."""

from __future__ import annotations

import signal


def dask_setup(worker: object) -> None:
    """Called by Dask in the worker's main thread, before it takes work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
