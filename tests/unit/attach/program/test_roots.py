"""What tells whether a program is another one."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from nostall.attach.program.roots import (  # noqa: E402
    Switch,
    model_identity,
    other_program,
    source_identity,
)


def test_other_sizes_and_dtypes_are_another_program() -> None:
    linear = torch.nn.Linear
    assert model_identity([linear(4, 4)]) == model_identity([linear(4, 4)])
    others = [linear(4, 5), linear(4, 4, bias=False), linear(4, 4).half(), torch.nn.BatchNorm1d(4)]
    assert len({model_identity([module]) for module in (linear(4, 4), *others)}) == 5


def test_other_sources_of_an_imported_module_are_another_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source, roots = tmp_path / "model_of_this_test.py", [torch.nn.Linear(4, 4)]
    before = {"model": model_identity(roots), "sources": source_identity()}
    source.write_text("WIDTH = 64")
    importlib.import_module("model_of_this_test")
    assert other_program(before, roots) == ""  # it was not imported then
    known = {"model": model_identity(roots), "sources": source_identity()}
    source.write_text("WIDTH = 2048")
    assert "the source of model_of_this_test is not" in other_program(known, roots)
    assert "the parameters have other names" in other_program(before, [torch.nn.Linear(4, 5)])


def test_what_is_compiled_around_a_settled_module_has_its_own_call() -> None:
    """As while it was measured: transformers compiles calls of a model in ``generate``."""
    root = torch.nn.Linear(3, 3)
    switch = Switch(root, [], lambda *_: None)
    switch.target = lambda x: x * 0.0
    switch.settle()
    x = torch.ones(2, 3)
    assert torch.equal(root(x), x * 0.0)
    around = torch.compile(root.__call__, backend="eager", fullgraph=True)
    assert torch.equal(around(x), root._call_impl(x))
