"""Ctrl-C during a search: an interrupt whose exception was lost is raised again."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import Any

from nostall.core.search import Checkpoint, Trial

_STANDARD_ERROR = 2
"""File descriptor."""


class Interruption:
    """Observer that ends a search at the next trial after Ctrl-C; use it in the main thread.

    Python raises the interrupt wherever the process happens to be.  In a callback from compiled
    code (Numba, a finalizer) the exception is printed or dropped, and the search would go on.  This
    observer therefore notes the interrupt and raises it again.
    """

    def __init__(self, notice: str | None = None) -> None:
        """``notice``: printed at the first Ctrl-C, because the work after it takes a while."""
        self.requested = False
        """Whether Ctrl-C was pressed and has not been raised at a trial."""
        self._notice = notice
        self._previous_handler: Any = None

    def __enter__(self) -> Interruption:
        self._previous_handler = signal.getsignal(signal.SIGINT)
        # A shell starts background jobs with interrupts ignored; these stay ignored.
        if self._previous_handler is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._on_sigint)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous_handler)

    def on_trial(self, trial: Trial) -> None:
        """Raise a noted interrupt, once."""
        if self.requested:
            self.requested = False
            raise KeyboardInterrupt

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Do nothing: the last checkpoint of an interrupted search must be written."""

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if self._notice is not None:
            # Not by print(): the signal may have come within a write to the same stream.
            with suppress(OSError):
                os.write(_STANDARD_ERROR, f"\n{self._notice}\n".encode())
            self._notice = None
        raise KeyboardInterrupt
