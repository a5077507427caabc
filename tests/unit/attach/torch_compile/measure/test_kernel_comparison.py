"""Kernels beside what Inductor makes of the same operators.  Nothing is compiled by it."""

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
from nostall.attach.torch_compile.measure.baselines import Rival, copied, rivals  # noqa: E402
from nostall.attach.torch_compile.measure.kernel_comparison import AllSlower, Duels  # noqa: E402
from nostall.attach.torch_compile.options import Settings  # noqa: E402
from nostall.attach.torch_compile.rewrite.kernel_selection import Selection, Stitching  # noqa: E402
from nostall.attach.torch_compile.rewrite.matching import owners, parts_of  # noqa: E402
from nostall.attach.torch_compile.store.kernel_store import Kept  # noqa: E402
from nostall.core.measurement import Kind  # noqa: E402
from nostall.fusion.capture import inference_graph  # noqa: E402
from nostall.gpu.clock import Run, Samples  # noqa: E402


class Block(nn.Module):
    """Norm, product, softmax under a mask that is computed, moments, product, norm of a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.LayerNorm(12), nn.LayerNorm(6)
        self.up = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.arange(12) > 3
        scores = self.up(self.first(x)).masked_fill(seen, -1.0).softmax(-1)
        variance, mean = torch.var_mean(scores, 0)
        return self.last(self.up(scores * variance + mean).view(-1, 6).exp())


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))


@pytest.fixture
def module() -> GraphModule:
    torch.manual_seed(0)
    return inference_graph(Block(), torch.rand(8, 12))


def found(module: GraphModule) -> list[Rival]:
    told = parts_of(module, Kept(), Selection("all"), Stitching())
    assert told is not None
    return rivals(module, *told)


class Keeper(Interpreter):
    """Remembers what every node computes."""

    values: dict[str, Any]

    def run_node(self, node: Any) -> Any:
        self.values[node.name] = super().run_node(node)
        return self.values[node.name]


def test_a_rival_computes_what_the_graph_computes(module: GraphModule) -> None:
    keeper = Keeper(module)
    keeper.values = {}
    draw = torch.Generator().manual_seed(0)
    fakes = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    keeper.run(*(torch.randn(x.shape, generator=draw) for x in fakes))
    every = found(module)
    assert len(every) >= 3
    for rival in every:
        graph = rival.module.graph
        given = [keeper.values[node.name] for node in graph.find_nodes(op="placeholder")]
        results = graph.output_node().all_input_nodes
        assert results
        for node, value in zip(results, rival.module(*given), strict=True):
            assert torch.equal(value, keeper.values[node.name])
            assert node.meta["val"].shape == value.shape


def test_constants_come_along_and_what_others_compute_does_not(module: GraphModule) -> None:
    made = {node.name: str(node.target) for node in module.graph.nodes}
    inside: set[str] = set()
    for rival in found(module):
        given = {made[n.name] for n in rival.module.graph.find_nodes(op="placeholder")}
        assert not {"aten.arange.start_step", "aten.scalar_tensor.default"} & given
        inside |= {str(n.target) for n in rival.module.graph.nodes if n.op == "call_function"}
    assert {"aten.arange.start_step", "aten.scalar_tensor.default"} <= inside
    assert "aten.addmm.default" not in inside


def test_kernels_of_one_aten_call_come_and_go_together(module: GraphModule) -> None:
    """The moments of a softmax are a mean in its kernel and a variance in the next one."""
    every = found(module)
    (together,) = [rival for rival in every if len(rival.parts) > 1]
    told = parts_of(module, Kept(), Selection("all"), Stitching())
    assert told is not None
    owner = owners(told[0])
    one, two = ({owner[i].name for i in part.operators} for part in together.parts)
    assert one & two
    alone = [rival for rival in every if rival is not together]
    calls = [{owner[i].name for part in r.parts for i in part.operators} for r in alone]
    assert not any(calls_of & (one | two) for calls_of in calls)


def test_a_copy_stays_as_it_was(module: GraphModule) -> None:
    copy, before = copied(module), str(module.graph)
    module.graph.erase_node(module.graph.output_node())
    assert str(copy.graph) == before
    assert [n.meta["val"].shape for n in copy.graph.find_nodes(op="placeholder")]


# -- duels -----------------------------------------------------------------------------------------


class Turns:
    """Times by the number of the duel: the kernels win where they are asked to."""

    name = "recorded"
    kind: Kind = "measured"

    def __init__(self, *won: bool, lost: float = 1.0) -> None:
        self.won, self.lost, self.asked = won, lost, list[str]()

    def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
        self.asked.append(graph)
        stitched = 0.5 if self.won[(len(self.asked) - 1) % len(self.won)] else self.lost
        return [[1.0] * 12, [stitched] * 12, [1.0] * 12]


class Plain:
    """A host that compiles nothing, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.inputs = error, list[list[Tensor]]()

    @property
    def uncaptured(self) -> Plain:
        return self

    def plain(self, module: GraphModule, inputs: Sequence[Any], observe: Any = None) -> Any:
        if self.error is not None:
            raise self.error
        self.inputs.append(list(inputs))
        return module

    def stitched(self, module: Any, inputs: Any, selection: Any, done: Any) -> Any:
        raise AssertionError("duels compile no stitched versions")


def duels(clock: Turns | None, module: GraphModule, **settings: Any) -> Duels:
    made = Duels(clock, Settings(extent="all", **settings), {})
    made.add(module)
    return made


def test_losers_are_named_once_and_the_same_ever_after(module: GraphModule) -> None:
    clock, host = Turns(True, False), Plain()
    lost = duels(clock, module).losers(host, 60.0)
    every = {part.key for rival in found(module) for part in rival.parts}
    assert lost and lost < every
    assert len(set(clock.asked)) == len(clock.asked) == len(found(module))
    before = len(clock.asked)
    assert duels(clock, copied(module)).losers(host, 60.0) == lost
    assert len(clock.asked) == before
    left = parts_of(module, Kept(), Selection("all", lost), Stitching())
    assert left is not None
    assert {part.key for part in left[1]} == every - lost


def test_inputs_lie_as_they_do_in_the_graph(module: GraphModule) -> None:
    host = Plain()
    duels(Turns(True), module).losers(host, 60.0)
    fakes = {
        tuple((x.shape, x.stride(), x.dtype) for x in (n.meta["val"] for n in nodes))
        for nodes in (r.module.graph.find_nodes(op="placeholder") for r in found(module))
    }
    assert {tuple((x.shape, x.stride(), x.dtype) for x in given) for given in host.inputs} == fakes


def test_all_slower_is_said(module: GraphModule) -> None:
    with pytest.raises(AllSlower, match="every kernel is slower"):
        duels(Turns(False, lost=2.0), module).losers(Plain(), 60.0)


def test_where_none_is_faster_the_whole_graph_decides_about_those_not_slower(
    module: GraphModule,
) -> None:
    assert duels(Turns(False), module).losers(Plain(), 60.0) == frozenset()

    class Mixed(Turns):
        def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
            self.lost = 1.0 if self.asked else 2.0
            return super().samples(graph, runs, seconds)

    shutil.rmtree(Kept().folder)
    lost = duels(Mixed(False), module).losers(Plain(), 60.0)
    largest = max(found(module), key=lambda rival: rival.moved)
    assert lost == {part.key for part in largest.parts}


def test_what_cannot_be_compared_is_put_in(
    module: GraphModule, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Turns(False)
    with caplog.at_level("WARNING", "nostall"):
        assert duels(clock, module).losers(Plain(RuntimeError("no luck")), 60.0) == frozenset()
    assert [record.message for record in caplog.records] == [
        "nostall: a kernel is put in without a comparison of its own: RuntimeError: no luck"
    ]
    assert clock.asked == []


def test_where_all_comparisons_fail_every_kernel_is_put_in(
    module: GraphModule, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("a node")

    monkeypatch.setattr(kernel_comparison, "rivals", fails)
    with caplog.at_level("WARNING", "nostall"):
        assert duels(Turns(False), module).losers(Plain(), 60.0) == frozenset()
    assert "kernels were not compared on their own: KeyError" in caplog.text


def test_the_programs_random_numbers_go_on(module: GraphModule) -> None:
    class Drawing(Plain):
        def plain(self, module: GraphModule, inputs: Sequence[Any], observe: Any = None) -> Any:
            torch.rand(7)
            return super().plain(module, inputs)

    before = torch.get_rng_state()
    duels(Turns(True), module).losers(Drawing(), 60.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_when_time_is_up_the_smaller_ones_are_put_in_untried(
    module: GraphModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 0.5, *[9.0] * 99])
    monkeypatch.setattr(kernel_comparison.time, "perf_counter", lambda: next(times))
    clock = Turns(False)
    lost = duels(clock, module).losers(Plain(), 1.0)
    largest = max(found(module), key=lambda rival: rival.moved)
    assert lost == {part.key for part in largest.parts}
    assert len(clock.asked) == 1


@pytest.mark.parametrize("how", ["without a clock", "all"])
def test_without_a_clock_or_if_all_are_wanted_there_is_no_duel(
    module: GraphModule, how: str
) -> None:
    clock = None if how == "without a clock" else Turns(False)
    made = duels(clock, module, **({"keep": "all"} if how == "all" else {}))
    assert made.modules == []
    assert made.losers(Plain(), 60.0) == frozenset()


def test_tensors_with_strides_of_nothing_or_of_anything_are_drawn() -> None:
    layouts = [((3, 4), (0, 1), torch.float32), ((2, 3), (1, 2), torch.int64)]
    layouts += [((0, 4), (4, 1), torch.float32), ((), (), torch.bool)]
    for x, layout in zip(
        kernel_comparison._drawn(layouts, torch.device("cpu")), layouts, strict=True
    ):
        assert (tuple(x.shape), x.stride(), x.dtype) == layout
