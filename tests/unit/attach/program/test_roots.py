"""What tells whether a program is another one."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from nostall.attach.program.roots import program_identity  # noqa: E402


def test_other_sizes_and_dtypes_are_another_program() -> None:
    linear = torch.nn.Linear
    assert program_identity([linear(4, 4)]) == program_identity([linear(4, 4)])
    others = [linear(4, 5), linear(4, 4, bias=False), linear(4, 4).half(), torch.nn.BatchNorm1d(4)]
    assert len({program_identity([module]) for module in (linear(4, 4), *others)}) == 5


def test_other_sources_of_an_imported_module_are_another_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    before = program_identity([])
    source = tmp_path / "model_of_this_test.py"
    source.write_text("WIDTH = 64")
    importlib.import_module("model_of_this_test")
    first = program_identity([])
    source.write_text("WIDTH = 2048")
    assert len({before, first, program_identity([])}) == 3
