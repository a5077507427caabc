"""The verifier looks at a learning strategy's checkpoints, not only at its result."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from nostall.core import Checkpoint, Trial
from nostall.sass.schedule import ScheduleSpace

_SHARE = 0.1


class JudgedCheckpoints:
    """Observer that has the best of each checkpoint judged before the checkpoint is written.

    ``judge`` raises for a cubin that the verifier refuses, which ends the search.  Judging takes
    at most a tenth of the time: a best that comes sooner is judged at a later checkpoint, or as
    the result.
    """

    def __init__(self, space: ScheduleSpace, judge: Callable[[bytes], object]) -> None:
        self.space, self.judge = space, judge
        self._last = space.dump(space.start())
        self._due = monotonic()

    def on_trial(self, trial: Trial) -> None:
        """Nothing to judge."""

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        began = monotonic()
        if checkpoint.best == self._last or began < self._due:
            return
        self.judge(self.space.impose(self.space.load(checkpoint.best)).to_cubin())
        self._last = checkpoint.best
        ended = monotonic()
        self._due = ended + (ended - began) * (1 / _SHARE - 1)
