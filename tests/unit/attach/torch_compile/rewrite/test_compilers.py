"""Compilers and Inductor's custom pass: cache keys, fallbacks, and limits of worker processes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from torch._inductor import config  # noqa: E402
from torch.fx import GraphModule, symbolic_trace  # noqa: E402

from nostall.attach.torch_compile.backend import Backend  # noqa: E402
from nostall.attach.torch_compile.graph_key import graph_key  # noqa: E402
from nostall.attach.torch_compile.options import Options  # noqa: E402
from nostall.attach.torch_compile.rewrite.compilers import (  # noqa: E402
    EagerCompiler,
    InductorCompiler,
    inductor_patches,
)
from nostall.attach.torch_compile.rewrite.inductor_pass import (  # noqa: E402
    PASS_OPTION,
    StitchPass,
    collect_result,
)
from nostall.attach.torch_compile.rewrite.kernel_selection import (  # noqa: E402
    KernelFilter,
    RewriteResult,
)
from nostall.attach.torch_compile.store.kernel_store import KernelStore  # noqa: E402
from nostall.attach.torch_compile.store.records import SelectionRecord  # noqa: E402


def trace() -> GraphModule:
    return symbolic_trace(lambda x, y: (torch.softmax(x * 2.0, -1) + y,))


INDUCTORS_VERSION = SelectionRecord(
    version="inductor",
    reason="slower as a whole",
    kernels=(),
    comparison=None,
    about={},
    created="",
)


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty store, and graphs on a CPU are supported."""
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))


def test_the_pass_does_nothing_outside_of_a_candidates_compilation() -> None:
    stitch_pass = StitchPass(KernelFilter("all"))
    graph = trace().graph
    before = str(graph)
    stitch_pass(graph)
    assert str(graph) == before
    with collect_result(RewriteResult()):
        active = stitch_pass.uuid()
    assert active != stitch_pass.uuid()


def test_a_user_pass_without_a_cache_key_turns_caching_off() -> None:
    assert StitchPass(KernelFilter("all"), user_pass=lambda graph: None).uuid() is None


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("background", [True, False])
def test_a_run_with_a_stored_selection_has_the_passes_of_the_run_that_made_it(
    monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """PyTorch's cache keys contain the passes."""
    passes = []

    def compile_fx(module: Any, inputs: Any, config_patches: Any) -> Any:
        custom_pass = config_patches.get(PASS_OPTION)
        passes.append(custom_pass and custom_pass.uuid())
        return module.forward

    # The real module takes seconds to import.
    inductor = SimpleNamespace(compile_fx=compile_fx)
    monkeypatch.setitem(sys.modules, "torch._inductor.compile_fx", inductor)
    options = {"nostall.background": background}
    inputs = [torch.ones(3, 4), torch.ones(3, 4)]
    selecting = Backend()
    selecting(trace(), inputs, options=options)
    (report,) = selecting.reports
    KernelStore().save(report.graph, INDUCTORS_VERSION)
    knowing = Backend()
    knowing(trace(), inputs, options=options)
    assert knowing.reports[0].from_store
    first, second = passes
    assert first == second


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("known", [True, False])
def test_without_a_toolchain_pytorchs_operators_run_with_and_without_a_stored_selection(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    def compile_fx(module: Any, inputs: Any, config_patches: Any) -> Any:
        raise InvalidCxxCompiler

    inductor = SimpleNamespace(compile_fx=compile_fx)
    monkeypatch.setitem(sys.modules, "torch._inductor.compile_fx", inductor)
    inputs = [torch.ones(3, 4), torch.full((3, 4), 2.0)]
    if known:
        key = graph_key(trace(), inputs, Options(), inductor_patches(None, None))
        KernelStore().save(key, INDUCTORS_VERSION)
    backend = Backend()
    run = backend(trace(), inputs)
    assert backend.reports[0].from_store == known
    found, expected = run(*inputs), trace()(*inputs)
    assert torch.equal(*(x[0] if isinstance(x, (list, tuple)) else x for x in (found, expected)))


def test_a_compiler_says_why_workers_cannot_compile_for_it() -> None:
    assert not InductorCompiler({}).local_only_reason
    assert not InductorCompiler(inductor_patches("reduce-overhead", None)).local_only_reason
    tuned = InductorCompiler(inductor_patches("max-autotune-no-cudagraphs", None))
    assert tuned.local_only_reason == "Inductor measures while it compiles (max_autotune)"
    assert EagerCompiler().local_only_reason
    with config.patch(fx_graph_cache=False):
        assert InductorCompiler({}).local_only_reason == "Inductor's cache is off"
    with config.patch({"triton.autotune_at_compile_time": True}):
        assert "autotune_at_compile_time" in InductorCompiler({}).local_only_reason
    with config.patch(post_grad_custom_post_pass=lambda graph: None):
        assert "the user's own passes" in InductorCompiler({}).local_only_reason
    user_pass = InductorCompiler({"joint_custom_post_pass": print})
    assert "the user's own passes" in user_pass.local_only_reason


def test_the_cache_key_of_the_pass_says_whether_only_products_are_inserted(home: None) -> None:
    with collect_result(RewriteResult()):
        keys = [StitchPass(KernelFilter("all", products_only=x)).uuid() for x in (False, True)]
    assert keys[0] != keys[1]
