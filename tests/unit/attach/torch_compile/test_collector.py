"""Python's garbage collector is paused while a known version comes from PyTorch's caches."""

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
from nostall.attach.torch_compile.rewrite.inductor_pass import PASS_OPTION  # noqa: E402
from nostall.attach.torch_compile.store.kernel_store import KernelStore  # noqa: E402
from nostall.attach.torch_compile.store.records import SelectionRecord, Version  # noqa: E402


@pytest.fixture(autouse=True, params=[True, False], ids=["on", "off"])
def enabled(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the user has the collector enabled; the backend must not change that."""
    (gc.enable if request.param else gc.disable)()
    try:
        yield request.param
        assert gc.isenabled() == request.param
    finally:
        gc.enable()


def test_the_backend_imports_inductor_without_garbage_collections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enabled_at_import: dict[str, bool] = {}
    real_import = builtins.__import__

    def spy(name: str, *rest: Any, **named: Any) -> Any:
        enabled_at_import.setdefault(name, gc.isenabled())
        return real_import(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", spy)
    Backend()
    assert enabled_at_import["torch._inductor.compile_fx"] is False


class FakeInductor:
    """Replaces Inductor, which takes seconds to import.

    Graphs come from a cache, or go through the pass that the backend sets.
    """

    def __init__(self) -> None:
        self.cached = True
        # Whether the collector was enabled before and after each compilation.
        self.enabled: list[bool] = []

    def compile_fx(self, module: GraphModule, inputs: Any, config_patches: Any) -> Any:
        self.enabled.append(gc.isenabled())
        if not self.cached and PASS_OPTION in config_patches:
            config_patches[PASS_OPTION](symbolic_trace(lambda x: -x).graph)
        self.enabled.append(gc.isenabled())
        return module.forward


@pytest.fixture
def inductor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeInductor:
    fake = FakeInductor()
    module = SimpleNamespace(compile_fx=fake.compile_fx)
    monkeypatch.setitem(sys.modules, "torch._inductor.compile_fx", module)
    rewrite = "nostall.attach.torch_compile.rewrite"
    monkeypatch.setattr(f"{rewrite}.rewrite.insert_all", lambda *args: None)
    monkeypatch.setattr(f"{rewrite}.direct_call.use_direct_calls", lambda: None)
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    return fake


def compile_twice(version: Version, **options: Any) -> GraphReport:
    """Compile a graph without a selection, then again with a stored one; the second report."""

    def compile_once() -> GraphReport:
        backend = Backend()
        backend(symbolic_trace(lambda x: x + 1), [torch.ones(3)], options=options)
        return backend.reports[0]

    report = compile_once()
    record = SelectionRecord(
        version=version, reason="stored", kernels=(), comparison=None, about={}, created=""
    )
    KernelStore().save(report.graph, record)
    return compile_once()


@pytest.mark.parametrize("version", ["inductor", "stitched"])
@pytest.mark.parametrize("cached", [True, False])
def test_a_known_version_is_loaded_without_collections_unless_it_has_to_be_compiled(
    inductor: FakeInductor, enabled: bool, version: Version, cached: bool
) -> None:
    inductor.cached = cached
    report = compile_twice(version)
    assert report.from_store and report.state == version
    without_selection, with_selection = inductor.enabled[:2], inductor.enabled[2:]
    assert without_selection == [enabled, enabled]
    assert with_selection == [False, enabled and not cached]


def test_without_an_observing_pass_collections_go_on(inductor: FakeInductor, enabled: bool) -> None:
    """It is not known then whether the graph comes from a cache."""
    report = compile_twice("inductor", **{"nostall.background": False})
    assert report.from_store and inductor.enabled[2:] == [enabled, enabled]
