"""Tests of Ctrl-C: an interrupt whose exception was lost is raised at the next trial."""

from __future__ import annotations

import signal
from contextlib import suppress

import pytest

from nostall.cli.terminal.progress import Interruption
from nostall.core.search import Trial

TRIAL = Trial(1, 1.0, True, 1.0, "move", 0, 0.1)


def test_a_lost_interrupt_is_raised_again_once() -> None:
    handler = signal.getsignal(signal.SIGINT)
    with Interruption() as interruption:
        interruption.on_trial(TRIAL)
        with suppress(KeyboardInterrupt):  # as in a callback from compiled code
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interruption.on_trial(TRIAL)
        interruption.on_trial(TRIAL)
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_background_job_ignores_interrupts() -> None:
    """A shell starts `nostall tune &` with interrupts ignored, because Ctrl-C is not for it."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            signal.raise_signal(signal.SIGINT)
            interruption.on_trial(TRIAL)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, handler)
