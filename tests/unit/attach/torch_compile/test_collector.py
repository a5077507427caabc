"""Where a choice is known nothing is collected until a graph has to be compiled after all."""

from __future__ import annotations

import builtins
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from torch.fx import GraphModule, symbolic_trace  # noqa: E402

from nostall.attach.torch_compile.backend import Backend  # noqa: E402
from nostall.attach.torch_compile.report import GraphReport  # noqa: E402
from nostall.attach.torch_compile.rewrite.inductor_pass import PASS  # noqa: E402
from nostall.attach.torch_compile.store.kernel_store import Kept  # noqa: E402
from nostall.attach.torch_compile.store.records import ChoiceRecord, Version  # noqa: E402


@pytest.fixture(autouse=True, params=[True, False], ids=["on", "off"])
def before(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the program has the collector at work."""
    (gc.enable if request.param else gc.disable)()
    try:
        yield request.param
        assert gc.isenabled() == request.param
    finally:
        gc.enable()


def test_what_the_first_graph_needs_is_imported_with_the_backend_without_collections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, bool] = {}
    real = builtins.__import__

    def spied(name: str, *rest: Any, **named: Any) -> Any:
        seen.setdefault(name, gc.isenabled())
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", spied)
    Backend()
    assert seen["torch._inductor.compile_fx"] is False


class Caches:
    """In place of Inductor, which takes seconds to import: graphs come from a cache, or go through
    the pass that they have.  ``states``: the collector's before and after that."""

    def __init__(self) -> None:
        self.cached, self.states = True, list[bool]()

    def compile_fx(self, module: GraphModule, inputs: Any, config_patches: Any) -> Any:
        self.states.append(gc.isenabled())
        if not self.cached and PASS in config_patches:
            config_patches[PASS](symbolic_trace(lambda x: -x).graph)
        self.states.append(gc.isenabled())
        return module.forward


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Caches:
    found = Caches()
    inductor = SimpleNamespace(compile_fx=found.compile_fx)
    monkeypatch.setitem(sys.modules, "torch._inductor.compile_fx", inductor)
    monkeypatch.setattr("nostall.attach.torch_compile.rewrite.rewrite.rewrite", lambda *given: None)
    monkeypatch.setattr("nostall.attach.torch_compile.rewrite.direct_call.register", lambda: None)
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    return found


def compiled(version: Version, **options: Any) -> GraphReport:
    """A graph, where this version was chosen before."""

    def report() -> GraphReport:
        backend = Backend()
        backend(symbolic_trace(lambda x: x + 1), [torch.ones(3)], options=options)
        return backend.reports[0]

    found = report()
    choice = ChoiceRecord(
        version=version, reason="told", kernels=(), compared=None, about={}, created=""
    )
    Kept().keep(found.graph, choice)
    return report()


@pytest.mark.parametrize("version", ["inductor", "stitched"])
@pytest.mark.parametrize("cached", [True, False])
def test_a_known_choice_is_put_in_without_collections_unless_it_has_to_be_compiled(
    caches: Caches, before: bool, version: Version, cached: bool
) -> None:
    caches.cached = cached
    known = compiled(version)
    assert known.from_store and known.state == version
    unknown, found = caches.states[:2], caches.states[2:]
    assert unknown == [before, before] and found == [False, before and not cached]


def test_where_nobody_tells_whether_a_graph_is_compiled_collections_go_on(
    caches: Caches, before: bool
) -> None:
    known = compiled("inductor", **{"nostall.background": False})
    assert known.from_store and caches.states[2:] == [before, before]
