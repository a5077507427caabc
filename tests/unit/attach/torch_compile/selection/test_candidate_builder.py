"""Background work for a candidate: by a worker, or in this process."""

from __future__ import annotations

import gc
import logging
import threading
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from torch.fx import Graph as FxGraph  # noqa: E402
from torch.fx import GraphModule  # noqa: E402

from nostall.attach.torch_compile.measure.product_replacement import (  # noqa: E402
    Replacement,
)
from nostall.attach.torch_compile.options import Options  # noqa: E402
from nostall.attach.torch_compile.report import GraphReport  # noqa: E402
from nostall.attach.torch_compile.rewrite.kernel_selection import (  # noqa: E402
    KernelFilter,
    RewriteResult,
)
from nostall.attach.torch_compile.selection import candidate_builder, sources  # noqa: E402
from nostall.attach.torch_compile.selection.candidate_builder import (  # noqa: E402
    TUNED,
    CandidateBuilder,
)
from nostall.attach.torch_compile.selection.sources import (  # noqa: E402
    ProductSource,
    RegionSource,
)
from nostall.attach.torch_compile.selection.versions import (  # noqa: E402
    Candidate,
    GraphVersions,
)
from nostall.attach.torch_compile.store.rank_sync import Selection  # noqa: E402
from nostall.attach.torch_compile.store.records import RegionRecord, StepRecord  # noqa: E402
from nostall.attach.torch_compile.workers.tasks import BackgroundTasks  # noqa: E402
from nostall.fusion.graph.graph import Graph  # noqa: E402
from tests.unit.attach.torch_compile.regions import (  # noqa: E402
    no_candidates,
    normalized_rows,
    opaque_region,
    tuning,
)

CUDA = torch.device("cuda")
LARGE = 1 << 20
"""Rows of a kernel that takes long enough to be tuned."""


def source_of_regions(candidates: Any, *graphs: Graph) -> Any:
    """The source of stitched kernels, as far as it generates them.

    ``candidates``: what the code generation worker returns.
    """
    source = RegionSource.__new__(RegionSource)
    source.precompiler = SimpleNamespace(  # type: ignore[assignment]
        generate_kernels=lambda *_: candidates, wait_for_kernels="wait for kernels"
    )
    source.tuning, source.graphs, source.pending = tuning(), [], deque(graphs)
    source.versions = SimpleNamespace(  # type: ignore[assignment]
        device=CUDA, is_dynamic=False, local_only_reason="no worker"
    )
    return source


@pytest.mark.parametrize(
    ("graphs", "is_leader", "compared"), [(1, True, 2), (0, True, 0), (1, False, 0)]
)
def test_workers_are_attached_for_regions_that_are_compared(
    monkeypatch: pytest.MonkeyPatch, graphs: int, is_leader: bool, compared: int
) -> None:
    source = source_of_regions((), normalized_rows(8), normalized_rows(9))
    attached = list[int]()
    source.versions.local_only_reason = ""
    source.comparisons = SimpleNamespace(graphs=["forward"] * graphs)
    source.precompiler.attach_workers = attached.append
    sync = SimpleNamespace(current=lambda: SimpleNamespace(is_leader=is_leader))
    monkeypatch.setattr(sources, "RankSync", sync)
    assert [*source.generate()] == ["wait for kernels"]
    assert attached == [compared]


@pytest.mark.parametrize(
    ("local_only_reason", "regions", "started"),
    [("", 2, [2]), ("", 0, []), ("background preparation is off", 2, [])],
)
def test_workers_start_if_there_are_regions_and_workers_may_compile(
    monkeypatch: pytest.MonkeyPatch, local_only_reason: str, regions: int, started: list[int]
) -> None:
    found = [normalized_rows(8)] * regions
    monkeypatch.setattr(sources, "find_region_graphs", lambda module: found)
    source, calls = source_of_regions(()), list[int]()
    source.comparisons = SimpleNamespace(graphs=["forward"], add=lambda module: None)
    source.generate = None
    products = SimpleNamespace(is_enabled=False, add=lambda module: None)
    options = SimpleNamespace(background=True)
    builder: Any = SimpleNamespace(
        report=GraphReport(local_only_reason=local_only_reason),
        regions=source,
        products=products,
        sources=(source, products),
        precompiler=source.precompiler,
        versions=SimpleNamespace(device=CUDA, is_dynamic=False, options=options),
        tasks=BackgroundTasks(),
    )
    builder._add_graph = partial(CandidateBuilder._add_graph, builder)
    builder.precompiler.start_workers = lambda device, compared: calls.append(compared)
    CandidateBuilder._observe(builder, "a graph")  # type: ignore[arg-type]
    assert calls == started

    def fail(*_: Any) -> None:
        raise OSError("no luck")

    builder.precompiler.start_workers = fail
    CandidateBuilder._observe(builder, "another")  # type: ignore[arg-type]
    assert builder.tasks._sources == [None, None], "Inductor's compilation goes on"


def test_an_observer_of_graphs_does_not_keep_its_builder() -> None:
    """Inductor's compiled functions keep it, to compile a backward pass later."""
    observed = list[str]()

    class Observed(CandidateBuilder):
        def _observe(self, module: Any) -> None:
            observed.append(module)

    builder = Observed.__new__(Observed)
    observe: Any = builder._observer()
    observe("forward")
    del builder
    gc.collect()
    observe("backward")
    assert observed == ["forward"]


def test_regions_of_a_worker_are_tuned_and_their_kernels_waited_for() -> None:
    candidates = (no_candidates(normalized_rows(8)),)
    source = source_of_regions(candidates, normalized_rows(8))
    assert [*source.generate()] == ["wait for kernels"]
    assert source.tuning.candidates == [*candidates] and not source.pending
    assert [*source.generate()] == [], "no region is pending"


@pytest.mark.parametrize("is_leader", [True, False])
def test_only_rank_0_has_the_kernels_of_products_compiled(
    monkeypatch: pytest.MonkeyPatch, is_leader: bool
) -> None:
    source, product = source_of_products({}), normalized_rows(8)
    source.comparisons.product_graphs = lambda kernel_filter: [product]
    source.versions.device, source.versions.local_only_reason = torch.device("cpu"), ""
    generated: list[Any] = []
    source.precompiler = SimpleNamespace(
        generate_kernels=lambda graphs, tuning, device: generated.append(graphs) or (),
        wait_for_kernels="wait for kernels",
    )
    sync = SimpleNamespace(current=lambda: SimpleNamespace(is_leader=is_leader))
    monkeypatch.setattr(sources, "RankSync", sync)
    tasks = [*source.generate()]
    assert tasks == (["wait for kernels"] if is_leader else [])
    assert generated == ([[product]] if is_leader else [])


def test_without_a_worker_each_distinct_kernel_is_compiled_here_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    compiled: list[str] = []
    monkeypatch.setattr(sources, "compile_kernel", lambda kernel, device: compiled.append(kernel))
    large, small = normalized_rows(LARGE), normalized_rows(8)
    source = source_of_regions(None, large, opaque_region(), large, small)
    with caplog.at_level(logging.WARNING, "nostall"):
        for task in source.generate():
            task()
    assert "opaque" in caplog.text
    expected = {kernel for graph in (large, small) for kernel in tuning().prepare(graph)}
    assert sorted(compiled) == sorted(expected)


def region(kernel: str) -> RegionRecord:
    return RegionRecord(steps=(StepRecord(kernel, (0,), (1,), (1,), reduces=True),), not_fused={})


def source_of_products(chosen: dict[str, RegionRecord]) -> Any:
    """The source of product kernels, as far as it chooses the second candidate.

    ``chosen``: the products that are measured faster beside Inductor's kernels.
    """

    def choose(compiler: Any, kernel_filter: KernelFilter, known: Any) -> dict[str, RegionRecord]:
        assert kernel_filter.products_only and not kernel_filter.products and not known
        return chosen

    source: Any = ProductSource.__new__(ProductSource)
    source.comparisons = SimpleNamespace(is_enabled=True, chosen=choose, lines=["a line"])
    source.keys = {"product"}
    source.versions = SimpleNamespace(
        report=GraphReport(),
        compiler=SimpleNamespace(without_cuda_graphs=None),
        timed=lambda activity, work: work(),
        kernel_filter=lambda selection: KernelFilter(
            kept_in_inductor=selection.kept_in_inductor,
            regions=selection.regions,
            products_only=selection.products_only,
        ),
    )
    return source


REGIONS = {"stitched": region("norm"), "product": region("product")}
TRIED = Selection("stitched", frozenset({"kept"}), REGIONS)


def next_selection(
    source: Any,
    tried: Selection,
    *kernels: str,
    loss_lines: list[str] | None = None,
    attention: list[str] | None = None,
) -> Selection | None:
    candidate = Candidate(lambda *_: None, RewriteResult(), tried)
    builder: Any = SimpleNamespace(
        products=source,
        report=GraphReport(loss=loss_lines or [], attention=attention or []),
    )
    return CandidateBuilder._next_selection(builder, candidate, kernels)


def test_whole_logits_follow_a_candidate_with_chunked_losses() -> None:
    source = source_of_products({})
    whole = replace(TRIED, whole_logits=True)
    assert next_selection(source, TRIED, "norm", loss_lines=["a loss"]) == whole
    assert next_selection(source, TRIED, attention=["a mask"], loss_lines=["a loss"]) == whole
    # Nothing is left of a candidate of losses alone.
    assert next_selection(source, TRIED, loss_lines=["a loss"]) is None


def test_products_alone_follow_a_candidate_with_other_kernels() -> None:
    source = source_of_products({"other product": region("another")})
    found = next_selection(source, TRIED, "norm", "product")
    regions = {"stitched": region("norm"), "other product": region("another")}
    assert found == Selection("stitched", frozenset({"kept"}), regions, products_only=True)
    assert source.versions.report.products == ["a line"]


@pytest.mark.parametrize(
    ("tried", "kernels"),
    [
        (TRIED, ["product"]),
        (Selection("stitched", frozenset(), REGIONS, products_only=True), ["product"]),
    ],
)
def test_nothing_follows_a_candidate_of_products_alone(
    tried: Selection, kernels: list[str]
) -> None:
    assert next_selection(source_of_products({"p": region("p")}), tried, *kernels) is None


def test_nothing_follows_if_no_product_is_faster_beside_inductors_kernels() -> None:
    assert next_selection(source_of_products({}), TRIED, "norm", "product") is None


def test_a_worker_compiles_each_candidate_before_this_process_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(candidate_builder, "clone_graph", lambda module: module)
    second = Selection("stitched", products_only=True)
    jobs: list[bool] = []

    def compile_candidate(module: Any, args: Any, patches: Any, kernel_filter: Any) -> bool:
        jobs.append(kernel_filter)
        return True

    builder = SimpleNamespace(
        precompiler=SimpleNamespace(
            worker_died=False, compile_candidate=compile_candidate, rewrite_result="inserted"
        ),
        versions=SimpleNamespace(
            kernel_filter=lambda selection: selection.products_only, local_only_reason=""
        ),
        selection=None,
        tries_blocks=False,
        _patches=lambda selection: {},
        _select_kernels=lambda: TRIED,
        _rewritten=lambda module, selection: module,
        _compile=lambda module, args, selection, result: (selection, result),
    )
    build = partial(CandidateBuilder._build, builder, "graph", ())
    assert build(None) is None
    assert build(None) == (TRIED, "inserted")
    assert build(second) is None
    assert build(second) == (second, "inserted")
    assert jobs == [False, True]


@pytest.mark.parametrize("failure", ["", "a graph takes 99 MB"])
def test_the_version_with_tuned_blocks_comes_first_if_a_worker_has_compiled_it(
    monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    monkeypatch.setattr(candidate_builder, "clone_graph", lambda module: module)
    precompiler = SimpleNamespace(
        worker_died=False, has_tuned_version=not failure, tuned_failure=failure
    )
    builder: Any = SimpleNamespace(
        precompiler=precompiler, selection=None, tries_blocks=True, report=GraphReport()
    )
    builder.versions = SimpleNamespace(
        kernel_filter=lambda selection: None, local_only_reason="no worker"
    )
    builder._select_kernels = lambda: TRIED
    builder._rewritten = lambda module, selection: module
    builder._compile = lambda module, args, selection, result=None: selection
    precompiler.rewrite_result = None
    build = partial(CandidateBuilder._build, builder, "graph", ())
    assert [build(None), build(None)] == ([TRIED] * 2 if failure else [TUNED, TRIED])
    assert failure in builder.report.blocks_note


@pytest.mark.parametrize(("is_leader", "fails"), [(True, False), (True, True), (False, False)])
def test_kernels_that_a_product_replaces_are_not_inserted(
    monkeypatch: pytest.MonkeyPatch, is_leader: bool, fails: bool
) -> None:
    """Products are then chosen once more, because some have other readers.

    They stay if that fails.
    """
    asked: list[tuple[frozenset[str], dict[str, RegionRecord]]] = []
    moved = {"moved": region("dgelu")}

    def choose(compiler: Any, kernel_filter: KernelFilter, known: Any) -> dict[str, RegionRecord]:
        asked.append((kernel_filter.kept_in_inductor, dict(known)))
        return {} if fails and known else {"product": region("product"), **known}

    def replace_stitched(
        products: Any, measured: Any, compiler: Any, kernel_filter: Any, chosen: Any
    ) -> Any:
        assert measured == "records" and chosen == {"product": region("product")}
        return Replacement({"norm"}, moved)

    regions, products = source_of_regions(()), source_of_products({})
    products.comparisons.chosen = choose
    regions.clock, regions.comparisons = None, SimpleNamespace(records="records")
    regions._kept_in_inductor = lambda: frozenset({"slow"})
    regions._records = lambda: {"stitched": region("norm")}
    monkeypatch.setattr(sources, "replace_kernels", replace_stitched)
    sync = SimpleNamespace(current=lambda: SimpleNamespace(is_leader=is_leader))
    monkeypatch.setattr(sources, "RankSync", sync)
    builder: Any = SimpleNamespace(sources=(regions, products), report=GraphReport())
    selection = CandidateBuilder._select_kernels(builder)
    if not is_leader:
        assert asked == [] and selection.kept_in_inductor == {"slow"}
        return
    assert asked == [(frozenset({"slow"}), {}), (frozenset({"slow", "norm"}), moved)]
    if fails:
        assert (selection.kept_in_inductor, selection.regions) == ({"slow"}, REGIONS)
        return
    assert selection.kept_in_inductor == {"slow", "norm"}
    assert selection.regions == {**REGIONS, **moved}


@pytest.mark.parametrize("is_backward_observed", [False, True])
def test_kernels_of_graphs_that_a_worker_finds_are_generated_before_final_tasks(
    monkeypatch: pytest.MonkeyPatch, is_backward_observed: bool
) -> None:
    """The final tasks compile baselines, and would generate missing kernels in this process.

    Inductor may compile the backward pass although the forward pass came from a cache.
    """
    regions, order = {"forward": normalized_rows(8), "backward": normalized_rows(9)}, list[str]()
    monkeypatch.setattr(sources, "find_region_graphs", lambda name: [regions[name]])
    builder = CandidateBuilder.__new__(CandidateBuilder)
    builder.tasks, builder.report, builder.is_observed = BackgroundTasks(), GraphReport(), False
    builder.patches, source = {}, source_of_regions(())
    source.comparisons = SimpleNamespace(add=order.append, graphs=[])
    products = SimpleNamespace(add=lambda module: None, is_enabled=False, generate=lambda: iter(()))
    options = SimpleNamespace(background=True)
    fakes: dict[str, Any] = {
        "versions": SimpleNamespace(is_dynamic=False, options=options, device=CUDA),
        "regions": source,
        "products": products,
        "sources": (source, products),
    }

    def generate(graphs: Any, *_: Any) -> tuple[()]:
        order.append(f"{len(graphs)} kernels")
        return ()

    fakes["precompiler"] = SimpleNamespace(
        observation=lambda *_: lambda: ["forward", "backward"],
        attach_workers=lambda regions: None,
        generate_kernels=generate,
        wait_for_kernels=lambda: order.append("wait"),
        start_workers=lambda *_: None,
    )
    source.precompiler = fakes["precompiler"]
    source.versions.local_only_reason = fakes["versions"].local_only_reason = ""
    vars(builder).update(fakes)
    done = threading.Event()
    builder._observe_later(GraphModule(torch.nn.Module(), FxGraph()), ())
    if is_backward_observed:
        builder._observe("backward")  # type: ignore[arg-type]
    builder.tasks.add_final(done.set)
    builder.tasks.start()
    assert done.wait(30)
    graphs = ["backward", "forward"] if is_backward_observed else ["forward", "backward"]
    assert order[:3] == [*graphs, "2 kernels"]
    assert source.graphs == [regions[name] for name in graphs]


def test_nothing_is_compiled_while_dynamo_compiles_in_another_thread() -> None:
    """Tracing changes global state of PyTorch: two threads would change it at once."""
    from torch._dynamo.convert_frame import compile_lock

    versions = GraphVersions(Options(), {}, [torch.ones(3)], GraphReport("a" * 64))
    done = threading.Event()
    thread = threading.Thread(target=lambda: versions.timed("candidate", done.set))
    with compile_lock:
        thread.start()
        assert not done.wait(0.1)
    thread.join()
    assert done.is_set()
