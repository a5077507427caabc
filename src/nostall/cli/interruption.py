"""Ctrl-C during a search: an interrupt whose exception was lost is raised again."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from nostall.core.search import Checkpoint, Trial


class Interruption:
    """Observer that ends a search at the next trial after Ctrl-C; use it in the main thread.

    Python raises the interrupt wherever the process happens to be.  In a callback from compiled
    code (Numba, a finalizer) the exception is printed or dropped, and the search would go on.  This
    observer therefore notes the interrupt and raises it again.
    """

    def __init__(self) -> None:
        self.requested = False
        """Whether Ctrl-C was pressed and has not been raised at a trial."""
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
        raise KeyboardInterrupt
