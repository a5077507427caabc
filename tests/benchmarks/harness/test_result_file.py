"""What a result file says of the command that made it."""

from __future__ import annotations

import sys

import pytest
from benchmarks.harness.result_file import head


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("/home/me/results/x.json", "x.json"),
        ("results/x.json", "results/x.json"),
        ('{"out": "/home/me/x.json", "part": "a/b"}', '{"out": "x.json", "part": "a/b"}'),
    ],
)
def test_a_command_names_no_place_of_a_machine(
    word: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", word, "--limit", "3"])
    assert head()["command"].endswith(f" {said} --limit 3")
