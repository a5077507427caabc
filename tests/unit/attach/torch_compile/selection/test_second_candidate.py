"""A second candidate, which is tried if the first one is not faster: products alone."""

from __future__ import annotations

import functools
import gc
import logging
import time
import weakref
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from nostall.attach.torch_compile import training_steps  # noqa: E402
from nostall.attach.torch_compile.measure.call import Call  # noqa: E402
from nostall.attach.torch_compile.measure.graph_comparison import GraphClocks  # noqa: E402
from nostall.attach.torch_compile.report import GraphReport  # noqa: E402
from nostall.attach.torch_compile.rewrite.kernel_selection import RewriteResult  # noqa: E402
from nostall.attach.torch_compile.runtime.custom_op import record_call  # noqa: E402
from nostall.attach.torch_compile.selection import dispatcher  # noqa: E402
from nostall.attach.torch_compile.selection.accuracy_repair import AccuracyRepair  # noqa: E402
from nostall.attach.torch_compile.selection.dispatcher import (  # noqa: E402
    GraphDispatcher,
    SelectionContext,
)
from nostall.attach.torch_compile.selection.graph_state import GraphState  # noqa: E402
from nostall.attach.torch_compile.selection.versions import Candidate  # noqa: E402
from nostall.attach.torch_compile.store.kernel_store import KernelStore  # noqa: E402
from nostall.attach.torch_compile.store.rank_sync import RankSync, Selection  # noqa: E402
from nostall.attach.torch_compile.store.records import RegionRecord, SelectionRecord  # noqa: E402
from nostall.attach.torch_compile.workers.tasks import BackgroundTasks  # noqa: E402
from nostall.core.measurement import Kind  # noqa: E402
from nostall.gpu.clock import Run, Samples  # noqa: E402

GRAPH = "a" * 64
REGION = RegionRecord(steps=(), not_fused={})
WHOLE = Selection("stitched", frozenset({"kept"}), {"stitched": REGION})
PRODUCTS = Selection("stitched", frozenset({"kept"}), {"product": REGION}, products_only=True)


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No other graph of this process is pending, and the store is empty."""
    monkeypatch.setattr(dispatcher, "STEPS", training_steps.TrainingSteps())
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))


class RatioClock:
    """A clock by which the candidates of a graph have these ratios, one after the other."""

    name = "recorded"
    kind: Kind = "measured"

    def __init__(self, *ratios: float) -> None:
        self.ratios = [*ratios]

    def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
        return [[1.0] * 12, [1.0 / self.ratios.pop(0)] * 12, [1.0] * 12]


class Graph:
    """A dispatcher, and the versions that ran and were compiled."""

    def __init__(self, *ratios: float, next_selection: Any = None) -> None:
        self.ran: list[str] = []
        self.built: list[Selection | None] = []
        self.asked: list[tuple[str, Collection[str]]] = []
        context = SelectionContext(
            GRAPH,
            KernelStore(),
            GraphClocks(RatioClock(*ratios), 0.1),
            BackgroundTasks(),
            {},
            next_selection=next_selection or self._next_selection,
        )
        state = GraphState(GraphReport(GRAPH))
        self.dispatcher = GraphDispatcher(
            partial(self._run, "baseline"), self._build, context, state
        )
        self.report = self.dispatcher.report

    def call(self, count: int) -> list[str]:
        """The version that each of some calls ran; comparisons before it do not count."""
        ran = []
        for _ in range(count):
            self.dispatcher(torch.ones(3))
            ran.append(self.ran[-1])
        return ran

    def _run(self, name: str, x: Tensor) -> tuple[Tensor]:
        self.ran.append(name)
        if name != "baseline":
            record_call(f"kernel of {name}")
        return (x.exp(),)

    def _build(self, args: Any, selection: Selection | None) -> Candidate:
        self.built.append(selection)
        selection = selection or WHOLE
        return Candidate(partial(self._run, selection.title), RewriteResult(), selection)

    def _next_selection(self, candidate: Candidate, kernels: Collection[str]) -> Selection | None:
        self.asked.append((candidate.selection.title, kernels))
        return None if candidate.selection.products_only else PRODUCTS


def stored() -> SelectionRecord:
    record = KernelStore().load(SelectionRecord, GRAPH)
    assert record is not None
    return record


def test_products_alone_run_if_they_are_faster_and_all_kernels_are_not() -> None:
    graph = Graph(0.9, 1.25)
    assert graph.call(4) == ["baseline", "baseline", "products alone", "products alone"]
    assert graph.built == [None, PRODUCTS]
    assert graph.asked == [("all kernels", ("kernel of all kernels",))]
    reason = "faster as a whole (all kernels 0.900x, then products alone 1.250x)"
    assert (graph.report.state, graph.report.reason) == ("stitched", reason)


def test_if_no_candidate_is_faster_inductors_version_stays_with_both_ratios() -> None:
    graph = Graph(0.9, 0.95)
    assert graph.call(4) == ["baseline"] * 4
    assert graph.built == [None, PRODUCTS], "no third one is tried"
    reason = "slower as a whole (all kernels 0.900x, then products alone 0.950x)"
    assert (graph.report.state, graph.report.reason) == ("inductor", reason)


def test_a_faster_first_candidate_is_the_only_one() -> None:
    graph = Graph(1.25)
    assert graph.call(3)[1:] == ["all kernels"] * 2
    assert (graph.built, graph.asked) == ([None], [])
    assert graph.report.reason == "faster as a whole"


def test_the_store_has_the_selection_and_all_comparisons() -> None:
    Graph(0.9, 1.25).call(3)
    record = stored()
    assert record.version == "stitched" and record.products_only
    assert (record.regions, record.kept_in_inductor) == ({"product": REGION}, ("kept",))
    assert record.kernels == ("kernel of products alone",)
    assert record.comparison is not None and record.comparison.ratio == 1.25
    (earlier,) = record.earlier
    assert earlier.candidate == "all kernels"
    assert earlier.comparison.ratio == pytest.approx(0.9)
    assert SelectionRecord.read(record.json) == record


def test_the_report_explains_all_comparisons() -> None:
    graph = Graph(0.9, 0.95)
    graph.call(3)
    explained = graph.report.explain()
    assert "measured 0.950x" in explained.splitlines()[0]
    assert "  compared before: all kernels, measured 0.900x (0.900 to 0.900)" in explained


def test_a_failure_of_the_search_for_another_candidate_keeps_the_first_result(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(candidate: Candidate, kernels: Collection[str]) -> Selection | None:
        raise RuntimeError("no luck")

    graph = Graph(0.9, next_selection=fail)
    with caplog.at_level(logging.WARNING, "nostall"):
        assert graph.call(3) == ["baseline"] * 3
    assert "no second candidate is compiled: RuntimeError: no luck" in caplog.text
    assert (stored().version, stored().reason) == ("inductor", "slower as a whole")


def test_retain_graph_between_the_candidates_keeps_inductors_version() -> None:
    graph = Graph(0.9)
    x = torch.ones(3, requires_grad=True)
    for step in range(3):
        (result,) = graph.dispatcher(x)
        result.sum().backward(retain_graph=step == 1)
    assert graph.ran[-1] == "baseline"
    assert "retain_graph" in graph.report.reason
    assert graph.built == [None], "the second candidate is not compiled"


def test_retain_graph_while_a_comparison_waits_drops_it() -> None:
    graph = Graph(1.25)
    x = torch.ones(3, requires_grad=True)
    (first,) = graph.dispatcher(x)
    (second,) = graph.dispatcher(x)  # its comparison waits for both backward passes
    first.sum().backward()
    second.sum().backward(retain_graph=True)
    graph.dispatcher(x)
    assert graph.ran == ["baseline"] * 3
    assert "retain_graph" in graph.report.reason


@pytest.mark.parametrize("fails", ["compiling", "running", "no kernel"])
def test_a_second_candidate_that_fails_does_not_lose_the_first_comparison(fails: str) -> None:
    """Otherwise each later run would compile and compare both again."""
    graph = Graph(0.9)

    def build(args: Any, selection: Selection | None) -> Candidate:
        if selection is None:
            return built(args, selection)
        if fails == "compiling":
            raise RuntimeError("no luck")
        return Candidate(run, RewriteResult(), selection)

    def run(x: Tensor) -> tuple[Tensor]:
        if fails == "running":
            raise RuntimeError("no luck")
        return (x.exp(),)

    built, graph.dispatcher._build_candidate = graph.dispatcher._build_candidate, build
    assert graph.call(4) == ["baseline"] * 4
    record, report = stored(), graph.report
    assert (record.version, report.state) == ("inductor", "inductor")
    assert record.reason == report.reason
    assert record.reason.startswith("slower as a whole; products alone: ")
    expected = "nothing to stitch" if fails == "no kernel" else "no luck"
    assert record.reason.endswith(expected)
    assert record.comparison is not None and record.comparison.ratio == pytest.approx(0.9)
    assert record.earlier == () and report.earlier == []
    assert "compared before" not in report.explain()


def test_the_report_counts_the_kernels_of_the_last_candidate() -> None:
    """Also if its graphs come from PyTorch's cache, so that no kernel is inserted here."""
    graph = Graph(0.9, 1.25)
    graph.report.kernels = 12  # of the first one, as its compilation reports them
    graph.call(3)
    assert graph.report.kernels == 1


class Builder:
    """Stands for what prepares the candidates, and holds copies of the graph."""

    def build(self, args: Any, selection: Selection | None) -> Candidate:
        return Candidate(lambda x: (x.exp(),), RewriteResult(), WHOLE)

    def next_selection(self, candidate: Candidate, kernels: Any) -> Selection | None:
        return None

    def tasks(self) -> list[Any]:
        return []


@pytest.mark.parametrize("is_first_step", [True, False])
def test_nothing_that_prepares_candidates_is_kept_after_the_decision(is_first_step: bool) -> None:
    """Also not by tasks that are not started, and by Dynamo, which wraps the dispatcher."""
    builder = Builder()
    repair = AccuracyRepair(builder.build, lambda candidate: [], None, GraphReport())
    tasks = BackgroundTasks()
    tasks.add(builder.tasks)
    context = SelectionContext(
        GRAPH,
        KernelStore(),
        GraphClocks(RatioClock(), 0.1),
        tasks,
        {},
        repair=repair,
        next_selection=builder.next_selection,
    )
    state = GraphState(GraphReport(GRAPH))
    graph = GraphDispatcher(lambda x: (x.exp(),), builder.build, context, state)

    @functools.wraps(graph)
    def wrapped(x: Tensor) -> tuple[Tensor]:
        result: tuple[Tensor] = graph(x)
        return result

    reference = weakref.ref(builder)
    del builder, repair, context, tasks
    (result,) = wrapped(torch.ones(3, requires_grad=True))
    assert reference() is not None
    result.sum().backward(retain_graph=is_first_step)
    end = time.monotonic() + 30
    while not graph.report.reason and time.monotonic() < end:
        wrapped(torch.ones(3))
    assert ("retain_graph" if is_first_step else "nothing to stitch") in graph.report.reason
    gc.collect()
    assert reference() is None


def test_the_version_that_is_not_selected_is_freed() -> None:
    class Version:
        def __call__(self, x: Tensor) -> tuple[Tensor]:
            return (x.exp(),)

    graph = Graph(1.25)
    baseline = graph.dispatcher._active = graph.dispatcher._baseline = Version()
    wrapped, reference = functools.wraps(graph.dispatcher)(lambda: None), weakref.ref(baseline)
    del baseline
    for _ in range(3):
        graph.dispatcher(torch.ones(3))
    assert graph.report.state == "stitched"
    gc.collect()
    assert reference() is None and wrapped is not None


def test_a_repaired_second_candidate_still_has_products_alone() -> None:
    """The kernel that is not accurate is left out, and the others stay left out."""
    compiled: list[Selection] = []

    def compile_again(args: Any, selection: Selection) -> Candidate:
        compiled.append(selection)
        return Candidate(lambda x: (x.exp(),), RewriteResult(), selection)

    repair = AccuracyRepair(compile_again, lambda candidate: [], None, GraphReport())
    call = Call.record((torch.ones(3),), frozenset())
    repair._without(Candidate(lambda x: x, RewriteResult(), PRODUCTS), {"wrong"}, call)
    assert compiled == [replace(PRODUCTS, kept_in_inductor=frozenset({"kept", "wrong"}))]


def test_other_ranks_see_the_last_selection_only(monkeypatch: pytest.MonkeyPatch) -> None:
    job_store = torch.distributed.HashStore()

    def set_rank(rank: int) -> None:
        monkeypatch.setattr(RankSync, "current", classmethod(lambda cls: cls(job_store, rank)))

    leader, follower = Graph(0.9, 1.25), Graph()
    set_rank(0)
    assert leader.call(2) == ["baseline"] * 2
    set_rank(1)
    assert follower.call(3) == ["baseline"] * 3 and follower.built == []
    set_rank(0)
    assert leader.call(1) == ["products alone"]
    set_rank(1)
    assert follower.call(1) == ["products alone"]
    assert follower.built == [PRODUCTS]


def test_other_ranks_do_not_wait_for_a_rank_0_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    job_store = torch.distributed.HashStore()

    def set_rank(rank: int) -> None:
        monkeypatch.setattr(RankSync, "current", classmethod(lambda cls: cls(job_store, rank)))

    def fail(args: Any, selection: Selection | None) -> Candidate:
        raise RuntimeError("no luck")

    leader, follower = Graph(), Graph()
    leader.dispatcher._build_candidate = fail
    set_rank(0)
    assert leader.call(2) == ["baseline"] * 2
    assert KernelStore().load(SelectionRecord, GRAPH) is None, "the next run tries again"
    set_rank(1)
    assert follower.call(2) == ["baseline"] * 2
    assert (follower.report.state, follower.report.reason) == ("inductor", "rank 0 has chosen")
