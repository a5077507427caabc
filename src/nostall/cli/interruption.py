"""Ctrl-C during a search, heard even where the first one is lost."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from nostall.core.search import Checkpoint, Trial


class Interruption:
    """Observer that ends the search at its next trial after a Ctrl-C.

    An interrupt is raised wherever the program happens to be.  In a callback from compiled code
    (numba's, a finaliser's) it is printed or dropped and the search would go on; so it is noted
    too.  Use from the main thread.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Interruption:
        self._before = signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:  # as for a shell's background jobs
            signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def on_trial(self, trial: Trial) -> None:
        """Raise the interrupt again, once, where the search listens."""
        if self.asked:
            self.asked = False
            raise KeyboardInterrupt

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Nothing; the last checkpoint of an interrupted search has to pass."""

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        raise KeyboardInterrupt
