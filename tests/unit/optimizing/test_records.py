"""Records of `nostall tune app.py` in the whole program."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from nostall.cli.tuning import program
from nostall.optimizing import records
from nostall.optimizing.job import Options
from nostall.optimizing.records import Kept, keep_proven


class Shelf:
    """A store that notes what is removed."""

    removed: ClassVar[list[str]] = []

    def remove(self, row: Any) -> None:
        self.removed.append(row.id)


def row(id: str, original: str) -> Any:
    return SimpleNamespace(id=id, original=original)


def prove(monkeypatch: pytest.MonkeyPatch, outcome: str | None, used: str = "a") -> Kept:
    """What is kept of two records of the program's binary and one of another configuration."""
    Shelf.removed = []
    attempt = SimpleNamespace(
        level=SimpleNamespace(name="native kernels"), outcome=outcome, reason="1.04 times",
        kernels=[{"record": used}],
    )  # fmt: skip

    def run(command: Any, options: Options, say: Any) -> Any:
        assert command == ["python", "app.py"] and options.stored_only
        tried = [] if outcome is None else [attempt]
        return SimpleNamespace(attempts=tried, notes=["no step was seen"])

    monkeypatch.setattr(records, "optimize", run)
    monkeypatch.setattr(records, "Store", Shelf)
    rows = [row("a", "own"), row("b", "own"), row("c", "other")]
    return keep_proven(["python", "app.py"], rows, {"own"}, lambda line: None)


def test_only_what_gains_in_the_program_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prove(monkeypatch, "kept") == Kept(("a",), "1.04 times", 1)
    assert Shelf.removed == ["c", "b"]
    assert prove(monkeypatch, "dropped").records == () and Shelf.removed == ["c", "a", "b"]
    assert prove(monkeypatch, None).reason == "no step was seen"
    assert Shelf.removed == ["c", "a", "b"]


def test_other_configurations_need_no_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(records, "Store", Shelf)
    assert keep_proven(["none"], [row("c", "other")], set(), print) == Kept((), "", 1)


def test_records_that_another_run_adds_meanwhile_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {id: row(id, original) for id, original in (("a", "own"), ("b", "of another run"))}
    monkeypatch.setattr(program, "_records", lambda: found)
    monkeypatch.setattr(records, "keep_proven", lambda command, rows, *_: [r.id for r in rows])
    given: Any = SimpleNamespace(words=("app.py",))
    result: Any = SimpleNamespace(kernels=())
    kept: Any = program._prove(given, result, {}, {"own"})
    assert kept == ["a"] and program._prove(given, result, found, {"own"}) is None
