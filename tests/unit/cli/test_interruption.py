"""Ctrl-C that was lost on its way is raised again at the next trial."""

from __future__ import annotations

import signal
from contextlib import suppress

import pytest

from nostall.cli.interruption import Interruption
from nostall.core.search import Trial

TRIAL = Trial(1, 1.0, True, 1.0, "move", 0, 0.1)


def test_a_lost_interrupt_is_raised_again_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Interruption() as heard:
        heard.on_trial(TRIAL)
        with suppress(KeyboardInterrupt):  # as a callback from compiled code would
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            heard.on_trial(TRIAL)
        heard.on_trial(TRIAL)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_background_job_stays_deaf() -> None:
    """A shell starts `nostall tune &` with interrupts ignored: Ctrl-C is not meant for it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interruption() as heard:
            signal.raise_signal(signal.SIGINT)
            heard.on_trial(TRIAL)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
