"""Graphs that a code generator fails at are compiled in parts."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="compiling needs the extra nostall[torch]")

from torch.fx import symbolic_trace  # noqa: E402

from nostall.parallel.module.compilation import Compiled, _halves  # noqa: E402


class Steps(torch.nn.Module):
    """Arguments, a constant and a tuple that several parts read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.tensor(2.0))

    def forward(self, x: Any, y: Any) -> Any:
        first, second = torch.split(x * self.offset, 2)
        z = torch.sin(first) + y
        return torch.cumsum(z, 0) - y, second * self.offset


@pytest.mark.parametrize("failing", [torch.cumsum, torch.sin])
def test_all_parts_but_the_one_that_fails_are_compiled(
    failing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A code generator that fails where an operation is beside another one."""
    compiled: list[int] = []

    def compile_(module: Any, **_: Any) -> Any:
        targets = [n.target for n in module.graph.nodes if n.op == "call_function"]

        def call(*given: Any) -> Any:
            if failing in targets and len(targets) > 1:
                raise torch._dynamo.exc.InternalTorchDynamoError("no index")
            compiled.append(len(targets))
            return module(*given)

        return call

    monkeypatch.setattr(torch, "compile", compile_)
    notes: list[str] = []
    module = symbolic_trace(Steps())
    function = Compiled(module, notes.append)
    given = torch.randn(4, requires_grad=True), torch.randn(2, requires_grad=True)
    for _ in range(2):
        for found, wanted in zip(function(*given), module(*given), strict=True):
            assert torch.equal(found, wanted)
    assert notes == []
    operations = sum(n.op == "call_function" for n in module.graph.nodes)
    assert sum(compiled) >= 2 * operations and 1 in compiled


def test_a_single_operation_has_no_halves() -> None:
    module = symbolic_trace(torch.nn.Sequential(torch.nn.Tanh()))
    assert _halves(module) is None
