"""Verify the checkpoints of a learning strategy during the search, not only its result."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from nostall.core import Checkpoint, Trial
from nostall.sass.schedule import ScheduleSpace

_MAX_TIME_SHARE = 0.1
"""Share of the search time that verification may take."""


class CheckpointVerifier:
    """Observer that verifies the best schedule of a checkpoint before the checkpoint is written.

    A schedule that comes too soon after the last verification, given the time share, is skipped; a
    later checkpoint or the result is verified.
    """

    def __init__(self, space: ScheduleSpace, verify: Callable[[bytes], object]) -> None:
        """``verify`` raises an exception for an unsafe cubin, which ends the search."""
        self.space, self.verify = space, verify
        self._last_verified = space.dump(space.start())
        self._next_time = monotonic()

    def on_trial(self, trial: Trial) -> None:
        """Do nothing."""

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Verify the best schedule if it is new and if the time share allows it."""
        start = monotonic()
        if checkpoint.best == self._last_verified or start < self._next_time:
            return
        self.verify(self.space.impose(self.space.load(checkpoint.best)).to_cubin())
        self._last_verified = checkpoint.best
        end = monotonic()
        self._next_time = end + (end - start) * (1 / _MAX_TIME_SHARE - 1)
