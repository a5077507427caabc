"""The fixture that tests of the dispatcher begin with."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No other graph of this process is pending, and the store is empty."""
    # These need PyTorch, and a test without it is skipped, not an error of collection.
    from nostall.attach.torch_compile import training_steps
    from nostall.attach.torch_compile.selection import dispatcher

    monkeypatch.setattr(dispatcher, "STEPS", training_steps.TrainingSteps())
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
