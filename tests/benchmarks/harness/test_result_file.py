"""The command in the header of a result file."""

from __future__ import annotations

import sys

import pytest
from benchmarks.harness.result_file import head


@pytest.mark.parametrize(
    ("word", "recorded"),
    [
        ("/home/me/results/x.json", "x.json"),
        ("results/x.json", "results/x.json"),
        ('{"out": "/home/me/x.json", "part": "a/b"}', '{"out": "x.json", "part": "a/b"}'),
    ],
)
def test_a_command_has_no_absolute_paths(
    word: str, recorded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", word, "--limit", "3"])
    assert head()["command"].endswith(f" {recorded} --limit 3")
