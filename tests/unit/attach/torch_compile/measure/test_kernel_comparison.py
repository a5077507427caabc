"""Kernels compared with Inductor baselines.  Nothing is compiled by Inductor."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.fx import GraphModule, Interpreter  # noqa: E402

from nostall.attach.torch_compile.measure import kernel_comparison  # noqa: E402
from nostall.attach.torch_compile.measure.baselines import (  # noqa: E402
    InductorBaseline,
    copy_graph,
    inductor_baselines,
)
from nostall.attach.torch_compile.measure.kernel_comparison import (  # noqa: E402
    AllKernelsSlower,
    KernelComparisons,
)
from nostall.attach.torch_compile.options import Options  # noqa: E402
from nostall.attach.torch_compile.rewrite.kernel_selection import (  # noqa: E402
    KernelFilter,
    RewriteResult,
)
from nostall.attach.torch_compile.rewrite.matching import (  # noqa: E402
    match_kernels,
    operator_owners,
)
from nostall.attach.torch_compile.store.kernel_store import KernelStore  # noqa: E402
from nostall.core.measurement import Kind  # noqa: E402
from nostall.fusion.capture import inference_graph  # noqa: E402
from nostall.gpu.clock import Run, Samples  # noqa: E402


class Block(nn.Module):
    """Norm, product, softmax with a computed mask, moments, product, and norm of a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.LayerNorm(12), nn.LayerNorm(6)
        self.up = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(12) > 3
        scores = self.up(self.first(x)).masked_fill(mask, -1.0).softmax(-1)
        variance, mean = torch.var_mean(scores, 0)
        return self.last(self.up(scores * variance + mean).view(-1, 6).exp())


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))


@pytest.fixture
def module() -> GraphModule:
    torch.manual_seed(0)
    return inference_graph(Block(), torch.rand(8, 12))


def baselines(module: GraphModule) -> list[InductorBaseline]:
    matched = match_kernels(module, KernelStore(), KernelFilter("all"), RewriteResult())
    assert matched is not None
    return inductor_baselines(module, *matched)


class RecordingInterpreter(Interpreter):
    """Keeps the value of every node."""

    values: dict[str, Any]

    def run_node(self, node: Any) -> Any:
        self.values[node.name] = super().run_node(node)
        return self.values[node.name]


def test_a_baseline_computes_the_same_values_as_the_graph(module: GraphModule) -> None:
    interpreter = RecordingInterpreter(module)
    interpreter.values = {}
    generator = torch.Generator().manual_seed(0)
    fakes = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    interpreter.run(*(torch.randn(x.shape, generator=generator) for x in fakes))
    found = baselines(module)
    assert len(found) >= 3
    for baseline in found:
        graph = baseline.module.graph
        inputs = [interpreter.values[node.name] for node in graph.find_nodes(op="placeholder")]
        results = graph.output_node().all_input_nodes
        assert results
        for node, value in zip(results, baseline.module(*inputs), strict=True):
            assert torch.equal(value, interpreter.values[node.name])
            assert node.meta["val"].shape == value.shape


def test_a_baseline_contains_constants_but_no_other_computed_inputs(module: GraphModule) -> None:
    targets = {node.name: str(node.target) for node in module.graph.nodes}
    constants = {"aten.arange.start_step", "aten.scalar_tensor.default"}
    calls: set[str] = set()
    for baseline in baselines(module):
        inputs = {targets[n.name] for n in baseline.module.graph.find_nodes(op="placeholder")}
        assert not constants & inputs
        nodes = baseline.module.graph.nodes
        calls |= {str(node.target) for node in nodes if node.op == "call_function"}
    assert constants <= calls
    assert "aten.addmm.default" not in calls


def test_kernels_of_one_aten_call_share_a_baseline(module: GraphModule) -> None:
    """The moments of a softmax are a mean in its kernel and a variance in the next kernel."""
    found = baselines(module)
    (shared,) = [baseline for baseline in found if len(baseline.matches) > 1]
    matched = match_kernels(module, KernelStore(), KernelFilter("all"), RewriteResult())
    assert matched is not None
    owners = operator_owners(matched[0])
    first, second = ({owners[i].name for i in match.operators} for match in shared.matches)
    assert first & second
    alone = [baseline for baseline in found if baseline is not shared]
    calls = [{owners[i].name for match in b.matches for i in match.operators} for b in alone]
    assert not any(names & (first | second) for names in calls)


def test_a_copy_of_a_graph_does_not_change_with_the_original(module: GraphModule) -> None:
    copy, before = copy_graph(module), str(module.graph)
    module.graph.erase_node(module.graph.output_node())
    assert str(copy.graph) == before
    assert [n.meta["val"].shape for n in copy.graph.find_nodes(op="placeholder")]


class RecordedClock:
    """A clock by which kernels take 0.5 s at some comparisons, in turn, and ``slow_s`` at others.

    The baselines always take 1 s.
    """

    name = "recorded"
    kind: Kind = "measured"

    def __init__(self, *faster: bool, slow_s: float = 1.0) -> None:
        self.faster, self.slow_s, self.asked = faster, slow_s, list[str]()

    def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
        self.asked.append(graph)
        is_faster = self.faster[(len(self.asked) - 1) % len(self.faster)]
        return [[1.0] * 12, [0.5 if is_faster else self.slow_s] * 12, [1.0] * 12]


class FakeCompiler:
    """A compiler that returns the graph itself, or raises an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.inputs = error, list[list[Tensor]]()

    @property
    def without_cuda_graphs(self) -> FakeCompiler:
        return self

    def compile_baseline(
        self, module: GraphModule, inputs: Sequence[Any], observe: Any = None
    ) -> Any:
        if self.error is not None:
            raise self.error
        self.inputs.append(list(inputs))
        return module

    def compile_candidate(self, module: Any, inputs: Any, kernel_filter: Any, result: Any) -> Any:
        raise AssertionError("comparisons of kernels compile no candidate")


def comparisons(
    clock: RecordedClock | None, module: GraphModule, **options: Any
) -> KernelComparisons:
    made = KernelComparisons(clock, Options(fuse="all", **options), {})
    made.add(module)
    return made


def keys(found: Sequence[InductorBaseline]) -> set[str]:
    return {match.key for baseline in found for match in baseline.matches}


def test_kernels_are_compared_once_and_the_result_is_stored(module: GraphModule) -> None:
    clock, compiler = RecordedClock(True, False), FakeCompiler()
    kept = comparisons(clock, module).kept_in_inductor(compiler, 60.0)
    all_keys = keys(baselines(module))
    assert kept and kept < all_keys
    assert len(set(clock.asked)) == len(clock.asked) == len(baselines(module))
    before = len(clock.asked)
    assert comparisons(clock, copy_graph(module)).kept_in_inductor(compiler, 60.0) == kept
    assert len(clock.asked) == before
    matched = match_kernels(module, KernelStore(), KernelFilter("all", kept), RewriteResult())
    assert matched is not None
    assert {match.key for match in matched[1]} == all_keys - kept


def test_inputs_of_a_baseline_have_the_layouts_of_the_graph(module: GraphModule) -> None:
    compiler = FakeCompiler()
    comparisons(RecordedClock(True), module).kept_in_inductor(compiler, 60.0)

    def layouts(tensors: Sequence[Any]) -> tuple[Any, ...]:
        return tuple((x.shape, x.stride(), x.dtype) for x in tensors)

    expected = {
        layouts([node.meta["val"] for node in b.module.graph.find_nodes(op="placeholder")])
        for b in baselines(module)
    }
    assert {layouts(inputs) for inputs in compiler.inputs} == expected


def test_if_all_kernels_are_slower_an_error_is_raised(module: GraphModule) -> None:
    clock = RecordedClock(False, slow_s=2.0)
    with pytest.raises(AllKernelsSlower, match="every kernel is slower"):
        comparisons(clock, module).kept_in_inductor(FakeCompiler(), 60.0)


def test_if_no_kernel_is_faster_only_slower_ones_stay_with_inductor(module: GraphModule) -> None:
    equal = comparisons(RecordedClock(False), module)
    assert equal.kept_in_inductor(FakeCompiler(), 60.0) == frozenset()

    class FirstIsSlower(RecordedClock):
        def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
            self.slow_s = 1.0 if self.asked else 2.0
            return super().samples(graph, runs, seconds)

    shutil.rmtree(KernelStore().folder)
    kept = comparisons(FirstIsSlower(False), module).kept_in_inductor(FakeCompiler(), 60.0)
    largest = max(baselines(module), key=lambda baseline: baseline.bytes_moved)
    assert kept == keys([largest])


def test_a_kernel_whose_comparison_fails_is_fused(
    module: GraphModule, caplog: pytest.LogCaptureFixture
) -> None:
    clock, compiler = RecordedClock(False), FakeCompiler(RuntimeError("no luck"))
    with caplog.at_level("WARNING", "nostall"):
        assert comparisons(clock, module).kept_in_inductor(compiler, 60.0) == frozenset()
    assert [record.message for record in caplog.records] == [
        "nostall: a kernel is fused without a comparison of its own: RuntimeError: no luck"
    ]
    assert clock.asked == []


def test_if_no_baseline_can_be_made_all_kernels_are_fused(
    module: GraphModule, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> Any:
        raise KeyError("a node")

    monkeypatch.setattr(kernel_comparison, "inductor_baselines", fail)
    with caplog.at_level("WARNING", "nostall"):
        made = comparisons(RecordedClock(False), module)
        assert made.kept_in_inductor(FakeCompiler(), 60.0) == frozenset()
    assert "kernels were not compared on their own: KeyError" in caplog.text


def test_random_generators_of_the_user_do_not_change(module: GraphModule) -> None:
    class RandomCompiler(FakeCompiler):
        def compile_baseline(
            self, module: GraphModule, inputs: Sequence[Any], observe: Any = None
        ) -> Any:
            torch.rand(7)
            return super().compile_baseline(module, inputs)

    before = torch.get_rng_state()
    comparisons(RecordedClock(True), module).kept_in_inductor(RandomCompiler(), 60.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_after_the_time_limit_smaller_kernels_are_fused_without_comparison(
    module: GraphModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 0.5, *[9.0] * 99])
    monkeypatch.setattr(kernel_comparison.time, "perf_counter", lambda: next(times))
    clock = RecordedClock(False)
    kept = comparisons(clock, module).kept_in_inductor(FakeCompiler(), 1.0)
    largest = max(baselines(module), key=lambda baseline: baseline.bytes_moved)
    assert kept == keys([largest])
    assert len(clock.asked) == 1


@pytest.mark.parametrize("case", ["without a clock", "keep all"])
def test_comparisons_are_disabled_without_a_clock_or_if_all_kernels_are_kept(
    module: GraphModule, case: str
) -> None:
    clock = None if case == "without a clock" else RecordedClock(False)
    made = comparisons(clock, module, **({"keep": "all"} if case == "keep all" else {}))
    assert made.graphs == []
    assert made.kept_in_inductor(FakeCompiler(), 60.0) == frozenset()
