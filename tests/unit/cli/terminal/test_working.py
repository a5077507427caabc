"""What a command says while it works: on a terminal at once, elsewhere nothing."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from nostall.cli.terminal import progress


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_shows_the_text_and_its_changes(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=is_terminal, width=80)
    monkeypatch.setattr(progress, "err", console)
    with progress.working("loading PyTorch") as say:
        assert ("loading PyTorch" in shown.getvalue()) == is_terminal
        say("tracing")
    assert ("tracing" in shown.getvalue()) == is_terminal
    with progress.working("never shown", enabled=False):
        assert "never shown" not in shown.getvalue()
