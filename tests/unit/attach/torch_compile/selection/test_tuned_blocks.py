"""Inductor's version with measured block sizes, which candidates must beat if it is faster."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch.fx import Graph as FxGraph  # noqa: E402
from torch.fx import GraphModule as FxModule  # noqa: E402

from nostall.attach.torch_compile import backend  # noqa: E402
from nostall.attach.torch_compile.measure.block_tuning import BlockTuning  # noqa: E402
from nostall.attach.torch_compile.measure.graph_comparison import GraphClocks  # noqa: E402
from nostall.attach.torch_compile.measure.kernel_comparison import AllKernelsSlower  # noqa: E402
from nostall.attach.torch_compile.options import Options  # noqa: E402
from nostall.attach.torch_compile.report import GraphReport  # noqa: E402
from nostall.attach.torch_compile.rewrite.compilers import InductorCompiler  # noqa: E402
from nostall.attach.torch_compile.rewrite.kernel_selection import RewriteResult  # noqa: E402
from nostall.attach.torch_compile.runtime.custom_op import record_call  # noqa: E402
from nostall.attach.torch_compile.selection.candidate_builder import TUNED  # noqa: E402
from nostall.attach.torch_compile.selection.dispatcher import (  # noqa: E402
    GraphDispatcher,
    SelectionContext,
)
from nostall.attach.torch_compile.selection.graph_state import GraphState  # noqa: E402
from nostall.attach.torch_compile.selection.versions import (  # noqa: E402
    Candidate,
    GraphVersions,
)
from nostall.attach.torch_compile.store.kernel_store import KernelStore  # noqa: E402
from nostall.attach.torch_compile.store.rank_sync import RankSync, Selection  # noqa: E402
from nostall.attach.torch_compile.workers.tasks import BackgroundTasks  # noqa: E402
from tests.unit.attach.torch_compile.selection.dispatching import GRAPH, stored  # noqa: E402
from tests.unit.attach.torch_compile.selection.test_second_candidate import (  # noqa: E402
    RatioClock,
)

pytestmark = pytest.mark.usefixtures("steps")
SPEED = {"baseline": 1.0, "tuned": 1.2, "kernels": 1.5}


class Graph:
    """A dispatcher with a version with tuned blocks, then one with kernels."""

    def __init__(self, *ratios: float, kernels: bool = True, fails: bool = False) -> None:
        self.ran: list[str] = []
        self.pairs: list[Sequence[Any]] = []
        self.kernels, self.fails, self.tried = kernels, fails, False
        clocks = GraphClocks(RatioClock(*ratios), 0.1)
        context = SelectionContext(GRAPH, KernelStore(), clocks, BackgroundTasks(), {})
        self.report = GraphReport(GRAPH)
        self.dispatcher = GraphDispatcher(
            partial(self._run, "baseline"), self._build, context, GraphState(self.report)
        )

    def last(self) -> str:
        """The version that runs once one is selected."""
        for _ in range(5):
            self.dispatcher(torch.ones(3))
        return self.ran[-1]

    def _run(self, name: str, x: Tensor) -> tuple[Tensor]:
        self.ran.append(name)
        if name == "kernels":
            record_call("a kernel")
        if name == "tuned" and self.fails:
            raise RuntimeError("out of memory")
        return (x.exp(),)

    def _build(self, args: Any, selection: Selection | None) -> Candidate:
        if not self.tried:
            self.tried = True
            return Candidate(partial(self._run, "tuned"), RewriteResult(), TUNED)
        if not self.kernels:
            raise AllKernelsSlower("every kernel is slower", frozenset())
        chosen = Selection("stitched", tuned=self.report.is_tuned)
        return Candidate(partial(self._run, "kernels"), RewriteResult(), chosen)


def test_kernels_run_if_they_are_faster_than_tuned_blocks() -> None:
    graph = Graph(1.2, 1.1)
    assert graph.last() == "kernels"
    record = stored()
    assert record is not None
    assert (record.version, record.tuned) == ("stitched", True)
    assert record.blocks is not None
    assert record.blocks.ratio == pytest.approx(1.2)
    assert "over Inductor's kernels with tuned blocks" in str(graph.report)


def test_tuned_blocks_run_if_no_candidate_is_faster() -> None:
    graph = Graph(1.2, 0.9)
    assert graph.last() == "tuned"
    record = stored()
    assert record is not None
    assert (record.version, record.tuned, graph.report.state) == ("tuned", True, "tuned")
    assert "0 of 0 kernels searched" in graph.report.explain()


def test_tuned_blocks_run_if_there_is_no_candidate() -> None:
    graph = Graph(1.2, kernels=False)
    assert graph.last() == "tuned"
    assert graph.report.reason.startswith("Inductor's kernels with tuned blocks are faster")


@pytest.mark.parametrize("fails", [False, True])
def test_blocks_without_a_gain_change_nothing(fails: bool) -> None:
    graph = Graph(*([1.3] if fails else [1.0, 1.3]), fails=fails)
    assert graph.last() == "kernels"
    record = stored()
    assert record is not None
    assert (record.version, record.tuned) == ("stitched", False)
    assert ("out of memory" in graph.report.blocks_note) == fails
    assert "tuned blocks" not in str(graph.report)


class Kernel:
    """What the search reads of Inductor's kernels."""

    save_cache_hook = None

    def __init__(self, milliseconds: float) -> None:
        from types import SimpleNamespace

        self.milliseconds = milliseconds
        self.measured: list[float] = []
        config = SimpleNamespace(found_by_coordesc=False)
        self.launchers = [SimpleNamespace(config=config)]
        self.coordesc_tuner = SimpleNamespace(autotune=self._explore)

    def bench(self, launcher: Any, *_: Any) -> float:
        return self.milliseconds

    def _explore(self, measure: Any, *_: Any) -> None:
        self.measured = [measure(number) for number in range(3)]

    def descend(self, launcher: Any) -> Any:
        self.coordesc_tuner.autotune(float)
        launcher.config.found_by_coordesc = True
        return launcher


def test_only_kernels_that_take_time_are_searched_and_only_within_the_limit() -> None:
    large, small, late, copying = Kernel(1.0), Kernel(0.001), Kernel(1.0), Kernel(1.0)
    tuning = BlockTuning(60.0, 1e12)
    for kernel in (large, small, late):
        tuning._time(None, kernel, kernel.launchers[0])
    tuning._time(None, copying, copying.launchers[0], torch.empty(250_000_000, device="meta"))
    for kernel in (large, small, copying):
        tuning._search(Kernel.descend, kernel, kernel.launchers[0])
    tuning._limit = 0.0
    tuning._search(Kernel.descend, late, late.launchers[0])
    assert large.measured == [0.0, 1.0, 2.0]
    assert not (small.measured or late.measured or copying.measured)
    assert all(x.launchers[0].config.found_by_coordesc for x in (large, small, late, copying))


def test_options_that_tune_all_versions_or_none_are_respected() -> None:
    assert InductorCompiler({}).untuned_reason == ""
    assert InductorCompiler(InductorCompiler({}).tuned.patches).untuned_reason
    assert InductorCompiler({"triton.cudagraphs": True}).untuned_reason
    assert Options().blocks == "small"


def test_blocks_of_another_process_do_not_run_where_they_are_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stored selection belongs to these options; none with blocks "off" has such block sizes."""

    def scope() -> str:
        versions = GraphVersions(Options(), {}, [torch.ones(3)], GraphReport(GRAPH))
        return versions.key_options.blocks

    assert scope() == "small"
    torch.use_deterministic_algorithms(True)
    try:
        assert scope() == "off"
    finally:
        torch.use_deterministic_algorithms(False)
    for name in ("force_disable_caches", "triton.cudagraphs"):
        with torch._inductor.config.patch({name: True}):
            assert scope() == "off"
    monkeypatch.setattr(RankSync, "current", lambda: RankSync(object(), 1))
    assert scope() == "off"


def test_tuned_blocks_are_chosen_again_if_inductors_cache_has_lost_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel would search without a limit of time."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert Graph(1.2, 0.9).last() == "tuned"
    graph = backend._Graph(FxModule({}, FxGraph()), [torch.ones(3)], Options(), {}, None, None)
    graph.report.graph = GRAPH
    for is_searched in (False, True):
        file = tmp_path / "ab" / f"{is_searched}.best_config"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"XBLOCK": 8, "found_by_coordesc": is_searched}))
        selection = graph._known_selection(KernelStore(), RankSync())
        assert (selection is not None and selection.version == "tuned") == is_searched
