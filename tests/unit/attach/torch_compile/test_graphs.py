"""Names of graphs, records of kernels, settings, and the order of nodes around changes in place."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.fx import Graph as FxGraph  # noqa: E402
from torch.fx import GraphModule, symbolic_trace  # noqa: E402

from nostall.attach.torch_compile.backend import Backend  # noqa: E402
from nostall.attach.torch_compile.graph_key import graph_key, unfit  # noqa: E402
from nostall.attach.torch_compile.options import Settings, settings_of  # noqa: E402
from nostall.attach.torch_compile.rewrite import (  # noqa: E402
    compilers,
    matching,
    rewrite,
)
from nostall.attach.torch_compile.rewrite.kernel_selection import Selection  # noqa: E402
from nostall.attach.torch_compile.store.records import (  # noqa: E402
    ChoiceRecord,
    Kept,
    KernelRecord,
    TensorRecord,
)
from nostall.attach.torch_compile.store.regions import raced_region, region_key, stitched_region  # noqa: E402
from nostall.core.errors import BadInput, BadRun  # noqa: E402
from nostall.fusion.codegen.cost.default_plan import first_choice  # noqa: E402
from nostall.fusion.codegen.emit.emit import emit  # noqa: E402
from nostall.fusion.codegen.emit.program import Program  # noqa: E402
from nostall.fusion.codegen.runtime.stitched_graph import generate, scheduled  # noqa: E402
from nostall.fusion.codegen.tiling.kernel_plan import plans  # noqa: E402
from nostall.fusion.graph.dynamic_size import resized  # noqa: E402
from nostall.fusion.graph.graph import Graph  # noqa: E402
from nostall.gpu import clock  # noqa: E402
from nostall.gpu.clock import RecordedClock, WallClock  # noqa: E402
from nostall.store.errors import BadStore  # noqa: E402
from tests.unit.fusion.capture.test_capture import inductor_dropout  # noqa: E402
from tests.unit.fusion.patterns import DYNAMIC, PACKED, PATTERNS, layer_norm  # noqa: E402


def test_options_are_ours_or_inductors() -> None:
    given = {"nostall.extent": "all", "nostall.seconds": 2, "max_autotune": True}
    settings, others = settings_of(given)
    assert (settings.extent, settings.seconds) == ("all", 2)
    assert others == {"max_autotune": True}
    assert compilers.inductor_patches("max-autotune-no-cudagraphs", others)["max_autotune"] is True


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("nostall.extent", "some", "'reductions' or 'all'"),
        ("nostall.background", 1, "True or False"),
        ("nostall.seconds", 0, "above 0"),
        ("nostall.speed", 1, "known are nostall.extent"),
    ],
)
def test_a_bad_option_says_what_is_allowed(name: str, value: Any, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        settings_of({name: value})


@pytest.mark.parametrize("name", PATTERNS)
def test_a_kernel_comes_back_from_the_store_as_it_was(name: str, tmp_path: Path) -> None:
    graph = PATTERNS[name]()
    of = scheduled(graph, graph.operators)
    program = emit(of, first_choice(of))
    kept = Kept(tmp_path)
    record, source = kept.kernel(kept.put(program))
    assert record == KernelRecord.of(program)
    assert source == program.source
    assert [(x.counts, x.grid, x.num_warps) for x in record.launches] == [
        (x.counts, x.grid, x.num_warps) for x in program.launches
    ]
    nodes = [program.graph[i] for i in (*program.inputs, *program.outputs)]
    tensors = (*record.inputs, *record.outputs)
    assert [(t.shape, t.strides, t.dtype) for t in tensors] == [
        (n.shape, n.strides, n.dtype) for n in nodes
    ]
    # Every tensor keeps its place in every launch, under its new name.
    names = {f"p{at}": name for at, name in enumerate(program.names)}
    for kept_launch, launch in zip(record.launches, program.launches, strict=True):
        assert tuple(names.get(a, a) for a in kept_launch.arguments) == launch.arguments


def every_plan(name: str) -> list[Program]:
    if name == "pack":
        graph = PACKED["dynamic"]()
        return [generate(graph, graph.operators)]
    graph = DYNAMIC[name]()
    of = scheduled(graph, graph.operators)
    return [emit(of, plan) for plan in plans(of).legal[::5]]


@pytest.mark.parametrize("name", [*DYNAMIC, "pack"])
def test_the_record_of_a_kernel_for_every_size_knows_each(name: str, tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    for program in every_plan(name):
        graph = program.graph
        record, _ = kept.kernel(kept.put(program))
        for size in (1, 16, 1009):
            other = Graph(tuple(n.resized(graph.varying, size) for n in graph), graph.outputs, None)
            found = record.at(size)
            given = [torch.empty(tensor.shape) for tensor in found.inputs]
            assert record.size_of(given) == size
            for launch, planned in zip(found.launches, program.launches, strict=True):
                numbers = (*planned.counts, *planned.grid)
                wanted = [resized(number, graph.varying, size) for number in numbers]
                assert [*launch.counts, *launch.grid] == wanted
            spaces = [resized(w.elements, graph.varying, size) for w in program.workspaces]
            assert [w.elements for w in found.workspaces] == spaces
            nodes = [other[i] for i in (*program.inputs, *program.outputs)]
            assert [t.shape for t in (*found.inputs, *found.outputs)] == [n.shape for n in nodes]


def test_what_is_raced_later_does_not_change_a_stored_choice(tmp_path: Path) -> None:
    graph, kept = layer_norm((4, 24), "float32"), Kept(tmp_path)
    key, before = region_key(graph), stitched_region(graph, kept)
    after = raced_region(graph, kept, lambda of: plans(of).legal[-1])
    assert stitched_region(graph, kept) == after != before
    chosen, other = (Selection(regions={key: record}) for record in (before, after))
    assert stitched_region(graph, kept, chosen.regions) == before
    assert chosen.name != other.name, "PyTorch's caches must not mix them"


def test_a_damaged_kernel_is_not_run(tmp_path: Path) -> None:
    graph = PATTERNS["gated"]()
    of = scheduled(graph, graph.operators)
    kept = Kept(tmp_path)
    kernel = kept.put(emit(of, first_choice(of)))
    path = kept.artefacts.path(kernel, "json")
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(BadStore, match="was changed"):
        kept.kernel(kernel)


def choice(about: dict[str, Any]) -> ChoiceRecord:
    return ChoiceRecord(
        version="inductor", reason="x", kernels=(), compared=None, about=about, created=""
    )


def test_records_hold_plain_values_whoever_gives_them(tmp_path: Path) -> None:
    """PyTorch's version is a text of a type of its own."""
    kept, asked = Kept(tmp_path), choice({"torch": torch.__version__})
    kept.keep("graph", asked)
    assert kept.answer(ChoiceRecord, "graph") == asked
    shape = TensorRecord(shape=torch.Size((2, 3)), strides=(3, 1), dtype="float32")
    assert TensorRecord.read(shape.json) == shape
    with pytest.raises(NotImplementedError, match="a record holds <object"):
        kept.keep("graph", choice({"gpu": object()}))


@pytest.mark.parametrize("change", [(b"{", b""), (b"inductor", b"other"), (b"reason", b"reasons")])
def test_a_choice_that_is_not_understood_is_none(tmp_path: Path, change: tuple[bytes, ...]) -> None:
    kept = Kept(tmp_path)
    kept.keep("graph", choice({}))
    (place,) = (tmp_path / "choices").iterdir()
    place.write_bytes(place.read_bytes().replace(*change))
    assert kept.answer(ChoiceRecord, "graph") is None


def test_an_emptied_store_has_another_identity(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    first = kept.identity
    assert Kept(tmp_path).identity == first
    (tmp_path / "identity").unlink()
    assert Kept(tmp_path).identity != first


def traced(scale: float) -> GraphModule:
    return symbolic_trace(lambda x, y: (torch.softmax(x * scale, -1) + y,))


def key(module: GraphModule, *inputs: Any, mode: dict[str, Any] | None = None) -> str:
    return graph_key(module, inputs, Settings(), mode or {})


def test_equal_graphs_have_equal_names_and_others_do_not() -> None:
    x = torch.ones(3, 4)
    name = key(traced(2.0), x, x)
    assert key(traced(2.0), x.clone(), x) == name
    others = [
        key(traced(3.0), x, x),
        key(traced(2.0), x.t().contiguous().t(), x),
        key(traced(2.0), x.double(), x),
        key(traced(2.0), x, x.clone().requires_grad_()),
        key(traced(2.0), x, x, mode={"max_autotune": True}),
    ]
    with torch.no_grad():
        others.append(key(traced(2.0), x, x))
    assert len({name, *others}) == 7


def counting(device: torch.device) -> GraphModule:
    graph = FxGraph()
    x = graph.placeholder("x")
    counted = graph.call_function(torch.arange, (3,), {"device": device})
    graph.output((graph.call_function(torch.add, (x, counted)),))
    return GraphModule(torch.nn.Module(), graph)


def test_a_graph_has_one_name_on_every_gpu_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks look for the choice of rank 0 under it."""
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "a GPU")
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    with FakeTensorMode():
        on_first, on_second = torch.ones(3, device=first), torch.ones(3, device=second)
    name = key(counting(first), on_first)
    assert key(counting(second), on_second) == name
    assert key(counting(second), on_first) != name


def test_graphs_that_are_left_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)
    module = traced(2.0)
    assert unfit(module, [torch.ones(3)]) == "not on a GPU"
    assert unfit(module, [1]) == "no tensor to begin with"
    assert unfit(module, [torch.ones(3), torch.ones(3, device="meta")]) == (
        "tensors on several devices"
    )


def test_the_pass_does_nothing_in_a_thread_that_does_not_stitch(tmp_path: Path) -> None:
    idle = compilers.StitchPass(matching.Selection("all"))
    graph = traced(2.0).graph
    before = str(graph)
    idle(graph)
    assert str(graph) == before
    with compilers._stitching(matching.Stitching()):
        active = idle.uuid()
    assert active != idle.uuid()
    assert compilers.StitchPass(matching.Selection("all"), before=lambda graph: None).uuid() is None


@pytest.mark.parametrize("background", [True, False])
def test_a_run_that_knows_its_choice_finds_what_pytorch_cached_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, background: bool
) -> None:
    """PyTorch's caches know a graph by the passes that it went through."""
    passes = []

    def compile_fx(module: Any, inputs: Any, config_patches: Any) -> Any:
        given = config_patches.get(compilers.PASS)
        passes.append(given and given.uuid())
        return module.forward

    # The real one takes seconds to import.
    inductor = SimpleNamespace(compile_fx=compile_fx)
    monkeypatch.setitem(sys.modules, "torch._inductor.compile_fx", inductor)
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    options = {"nostall.background": background}
    inputs = [torch.ones(3, 4), torch.ones(3, 4)]
    looking = Backend()
    looking(traced(2.0), inputs, options=options)
    (report,) = looking.reports
    choice = ChoiceRecord(
        version="inductor", reason="slower", kernels=(), compared=None, about={}, created=""
    )
    Kept().keep(report.graph, choice)
    knowing = Backend()
    knowing(traced(2.0), inputs, options=options)
    assert knowing.reports[0].from_store
    first, second = passes
    assert first == second


@pytest.mark.parametrize("known", [True, False])
def test_without_a_compiler_pytorchs_operators_run_whether_there_was_one_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, known: bool
) -> None:
    def compile_fx(module: Any, inputs: Any, config_patches: Any) -> Any:
        raise InvalidCxxCompiler

    from torch._inductor.exc import InvalidCxxCompiler

    inductor = SimpleNamespace(compile_fx=compile_fx)
    monkeypatch.setitem(sys.modules, "torch._inductor.compile_fx", inductor)
    monkeypatch.setattr("triton.knobs.runtime.interpret", True)
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    inputs = [torch.ones(3, 4), torch.full((3, 4), 2.0)]
    if known:
        name = graph_key(traced(2.0), inputs, Settings(), compilers.inductor_patches(None, None))
        choice = ChoiceRecord(
            version="inductor", reason="slower", kernels=(), compared=None, about={}, created=""
        )
        Kept().keep(name, choice)
    backend = Backend()
    module = traced(2.0)
    run = backend(module, inputs)
    assert backend.reports[0].from_store == known
    found, wanted = run(*inputs), traced(2.0)(*inputs)
    assert torch.equal(*(x[0] if isinstance(x, (list, tuple)) else x for x in (found, wanted)))


def test_nodes_are_put_behind_what_they_read_and_never_past_a_change_in_place() -> None:
    aten = torch.ops.aten
    graph = FxGraph()
    x = graph.placeholder("x")
    late = graph.call_function(aten.exp.default, (x,))
    read = graph.call_function(aten.neg.default, (x,))
    change = graph.call_function(aten.copy_.default, (x, late))
    output = graph.output((read, change))
    with graph.inserting_before(output):
        call = graph.call_function(aten.sin.default, (late,))
    read.args = (call,)
    at = {x: 0, late: 1, call: 1, read: 2, change: 3, output: 4}
    rewrite._sort(graph, at)
    graph.lint()
    assert [node.name for node in graph.nodes] == [
        n.name for n in (x, late, call, read, change)
    ] + ["output"]
    call.args = (change,)
    with pytest.raises(rewrite.Entangled):
        rewrite._sort(graph, at)


def test_random_numbers_are_drawn_in_the_order_of_before() -> None:
    aten = torch.ops.aten
    graph = FxGraph()
    x = graph.placeholder("x")
    late = graph.call_function(aten.exp.default, (x,))
    one = graph.call_function(aten.rand_like.default, (late,))
    two = graph.call_function(aten.rand_like.default, (x,))
    output = graph.output((one, two))
    # A kernel that the first draw reads has come later than the second one.
    at = {x: 0, one: 1, two: 2, late: 3, output: 5}
    rewrite._sort(graph, at)
    graph.lint()
    drawn = [node for node in graph.nodes if node in (one, two)]
    assert drawn == [one, two]


def test_recorded_times_are_for_graphs_that_were_recorded(tmp_path: Path) -> None:
    recorded = RecordedClock({"g": [[1.0], [2.0]]})
    assert recorded.samples("g", [int, int], 1.0) == [[1.0], [2.0]]
    with pytest.raises(BadRun, match="record it with this model"):
        recorded.samples("h", [int, int], 1.0)
    with pytest.raises(BadRun, match="no recording"):
        RecordedClock.of(tmp_path / "missing.json")


def test_runs_are_timed_in_turns_equally_often() -> None:
    order: list[str] = []
    runs = [lambda n=name: order.append(n) for name in "abc"]
    samples = WallClock().samples("g", runs, 1e-9)
    assert {len(times) for times in samples} == {12}
    assert len({order.count(name) for name in "abc"}) == 1


def test_every_sample_is_taken_behind_a_run_of_the_same() -> None:
    """Else the one that runs twice, the null, has its caches warm more often than the others."""
    last, cold = "", {"a": 0, "b": 0}
    taken = []

    def run(name: str) -> None:
        nonlocal last
        cold[name] += last != name
        last = name

    def timed(one: Any, times: int) -> float:
        before = sum(cold.values())
        one()
        taken.append(sum(cold.values()) - before)
        return 1e-3

    a, b = (lambda: run("a")), (lambda: run("b"))
    clock._in_turns(timed, [a, b, a], 1e-9)
    assert len(taken) > 3 * clock.FEWEST
    assert not any(taken[-3 * clock.FEWEST :])


@pytest.mark.parametrize("depends", [True, False])
def test_a_graph_whose_random_numbers_depend_on_its_kernels_is_left_alone(
    depends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its backward pass may draw them again, in a kernel of another form."""
    monkeypatch.setattr(matching, "numbers_depend_on_kernels", lambda: depends)
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    module, done = inductor_dropout("cuda"), matching.Stitching()
    before = str(module.graph)
    rewrite.rewrite(module, Kept(), matching.Selection("all"), done)
    assert (str(module.graph) == before) == depends
    assert (done.kernels == []) == depends
    alone = ("random numbers that depend on the kernel they are in", "whole graph")
    assert (alone in done.refused) == depends


def layers_with_dropout(at: tuple[int, ...], count: int) -> GraphModule:
    """One layer behind the other, as Inductor's graphs have them; each draws with the seed of its
    place and ends in a sum, which makes it worth a kernel."""
    from torch._inductor import inductor_prims
    from torch._subclasses import FakeTensorMode

    aten, graph = torch.ops.aten, FxGraph()

    def named(node: Any, shape: tuple[int, ...], dtype: Any = torch.float32) -> Any:
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="cuda")
        return node

    def call(target: Any, args: tuple[Any, ...], shape: tuple[int, ...], dtype: Any) -> Any:
        return named(graph.call_function(target, args), shape, dtype)

    with FakeTensorMode():
        x = named(graph.placeholder("x"), (64, 64))
        seeds = named(graph.placeholder("seeds"), (count,), torch.int64)
        for place in at:
            seed = call(inductor_prims.lookup_seed, (seeds, place), (), torch.int64)
            drawn = call(inductor_prims.random, ([64, 64], seed, "rand"), (64, 64), torch.float32)
            narrow = call(
                torch.ops.prims.convert_element_type.default,
                (drawn, torch.bfloat16),
                (64, 64),
                torch.bfloat16,
            )
            kept = call(aten.gt.Scalar, (narrow, 0.1), (64, 64), torch.bool)
            y = call(aten.mul.Tensor, (x, kept), (64, 64), torch.float32)
            total = call(aten.sum.dim_IntList, (y, [1], True), (64, 1), torch.float32)
            z = call(aten.sub.Tensor, (y, total), (64, 64), torch.float32)
            x = call(aten.mm.default, (z, z), (64, 64), torch.float32)
        graph.output((x,))
    return GraphModule({}, graph)


def rewritten(module: GraphModule, monkeypatch: pytest.MonkeyPatch) -> matching.Stitching:
    from nostall.fusion.capture import random_rules

    for where in (matching, random_rules):
        monkeypatch.setattr(where, "numbers_depend_on_kernels", lambda: False)
    done = matching.Stitching()
    rewrite.rewrite(module, Kept(), matching.Selection(), done)
    module.graph.lint()
    return done


def test_layers_that_draw_from_other_seeds_are_one_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is given the two seeds, beginning where tensors may begin, that its own is one of."""
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    module = layers_with_dropout((0, 2, 4), count=6)
    done = rewritten(module, monkeypatch)
    assert len(done.kernels) == 3 and len(set(done.kernels)) == 1
    pairs = module.graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor)
    assert [node.args[2:4] for node in pairs] == [(0, 2), (2, 4), (4, 6)]
    record, _ = Kept().kernel(done.kernels[0])
    assert [one.shape for one in record.inputs if one.dtype == "int64"] == [(2,)]
    left = {str(node.target) for node in module.graph.nodes if node.op == "call_function"}
    assert not [name for name in left if "prims" in name]


def test_seeds_at_odd_places_and_a_last_one_have_kernels_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    done = rewritten(layers_with_dropout((0, 1, 2), count=3), monkeypatch)
    assert len(set(done.kernels)) == 3


def test_numbers_are_compared_as_they_were_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor rounds none in between: a mask of ours would differ in one place of 7,000."""
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    module = layers_with_dropout((0,), count=2)
    (kernel,) = rewritten(module, monkeypatch).kernels
    _, source = Kept().kernel(kernel)
    assert "tl.rand(" in source
    assert "bfloat16" not in source
