"""PyTorch programs as operator graphs: same values, honest borders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="capture needs the extra nostall[torch]")

from benchmarks.fusion.small_models import models  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from nostall.fusion import BadCapture  # noqa: E402
from nostall.fusion.capture import (  # noqa: E402
    capture,
    inference_graph,
    training_graphs,
)
from nostall.fusion.capture.randomness import SEEDS, UNIFORM, replace_random_ops  # noqa: E402
from nostall.fusion.codegen.generate import scheduled  # noqa: E402
from nostall.fusion.graph.graph import Graph  # noqa: E402
from nostall.fusion.graph.regions import find_regions  # noqa: E402
from nostall.fusion.testing.reference import interpret  # noqa: E402
from tests.unit.fusion.capture.test_randomness import uniform  # noqa: E402


def values_of(module: Any) -> dict[Any, Any]:
    """What every node of an FX graph computes for random inputs."""

    class Keeper(torch.fx.Interpreter):
        def run_node(self, node: Any) -> Any:
            kept[node] = super().run_node(node)
            return kept[node]

    kept: dict[Any, Any] = {}
    torch.manual_seed(0)
    inputs = []
    for node in module.graph.find_nodes(op="placeholder"):
        fake = node.meta["val"]
        if fake.dtype.is_floating_point:
            value = torch.rand(fake.shape, dtype=fake.dtype) + 0.5
        else:
            value = torch.randint(0, 2, fake.shape).to(fake.dtype)
        inputs.append(torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype).copy_(value))
    Keeper(module).run(*inputs)
    return kept


def check(module: Any, rtol: float = 1e-9) -> int:
    """Every region of the graph gives what PyTorch gives; returns how many regions there are."""
    found = capture(module)
    values = values_of(module)

    def array(index: int) -> Any:
        return values[found.origins[index]].detach().numpy()

    parts = find_regions(found.graph)
    assert found.graph.is_acyclic(
        [[part.origins[i] for i in part.graph.operators] for part in parts]
    )
    for part in parts:
        results = interpret(part.graph, [array(index) for index in part.inputs])
        for index, result in zip(part.outputs, results, strict=True):
            wanted = array(index)
            assert (
                wanted.strides == tuple(s * wanted.itemsize for s in found.graph[index].strides)
                or wanted.size < 2
            )
            np.testing.assert_allclose(result, wanted, rtol=rtol, atol=rtol / 100)
    return len(parts)


# The others give the same parts; they are traced by benchmarks/fusion/explorers.py.
CHOSEN = ("bert", "resnet-block", "cross-entropy", "quantised-norm")


@pytest.mark.parametrize("name", CHOSEN)
def test_regions_compute_what_the_model_does(name: str) -> None:
    torch.manual_seed(0)
    module, inputs = models(small=True)[name]()
    doubled = [x.detach().double().requires_grad_() if x.is_floating_point() else x for x in inputs]
    if name == "quantised-norm":
        graphs = [inference_graph(module.double(), *doubled)]
    else:
        graphs = list(training_graphs(module.double(), *doubled))
    for graph in graphs:
        assert check(graph) >= 1


def traced(function: Any, *inputs: Any, mode: str = "fake") -> Any:
    return make_fx(function, tracing_mode=mode)(*inputs)


def refusals(function: Any, *inputs: Any, mode: str = "fake") -> dict[str, str]:
    """ATen operator by reason, of all that stays opaque."""
    found = capture(traced(function, *inputs, mode=mode))
    return dict(found.report.unsupported.keys())


def test_everything_that_is_left_out_has_a_reason() -> None:
    x, square = torch.rand(4, 6), torch.rand(4, 4)
    assert refusals(lambda x: (x @ x).cumsum(0), square).keys() == {"unsupported operator"}
    assert refusals(lambda x: torch.rand_like(x) + x, x).keys() == {"random numbers"}
    pairs = torch.rand(4, 3, 2)
    assert "dtype complex64" in refusals(lambda x: torch.view_as_complex(x) * 2, pairs)
    wide = torch.rand(70, 40), torch.rand(40, 50)
    product = refusals(lambda a, b: torch.bmm(a[None], b[None]).exp(), *wide)
    assert product.keys() == {"matrix product that does not wait for memory"}


def test_calls_that_give_nothing_stay_and_are_counted() -> None:
    class Labelled(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any, label: Any) -> Any:
            return x.softmax(-1) - torch.nn.functional.one_hot(label, 6)

    found = capture(inference_graph(Labelled(), torch.rand(4, 6), torch.tensor([0, 1, 2, 3])))
    assert found.report.unsupported == {("no tensor", "aten._assert_async.msg"): 2}
    assert {found.graph[i].op for i in found.graph.operators} >= {"exp", "eq"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_casts_to_e4m3_end_where_this_pytorch_ends(dtype: Any) -> None:
    """Before 2.12 what is beyond became NaN, which code generation does by itself."""
    x = torch.tensor([1e4, -1e4, 460.0, -1.5], dtype=dtype)
    graph = capture(traced(lambda x: x.to(torch.float8_e4m3fn), x)).graph
    (found,) = interpret(graph, [x.double().numpy()])
    wanted = x.to(torch.float8_e4m3fn).float()
    if bool(wanted.isnan().any()):
        assert [graph[i].op for i in graph.operators] == ["cast"]
    else:
        assert found.tolist()[:2] == wanted.tolist()[:2] == [448.0, -448.0]
        assert found.tolist()[2:] == [448.0, -1.5]


def test_what_is_changed_in_place_is_left_alone() -> None:
    def changes(x: Any) -> Any:
        rows = x.view(6, 4)
        before = rows * 2
        x.add_(1)
        return before + rows

    found = refusals(changes, torch.rand(4, 6))
    assert {"changes a tensor in place", "reads a tensor that is changed in place"} <= found.keys()


def test_a_list_of_tensors_that_is_changed_is_left_alone() -> None:
    def changes(x: Any, y: Any) -> Any:
        torch._foreach_add_([x, y], 1.0)
        return x * y

    found = refusals(changes, torch.rand(3), torch.rand(3))
    assert found["reads a tensor that is changed in place"] == "aten.mul.Tensor"


def symbolic(function: Any, *inputs: Any) -> Any:
    return capture(traced(function, *inputs, mode="symbolic"))


def test_one_size_may_be_known_at_run_time_only() -> None:
    """A prime stands for it, here 5: the first one from 5 on that divides no other size."""

    def function(x: Any) -> Any:
        wide = x[:, None] * torch.full((6,), 2.0)
        return (wide / wide.sum(-1, keepdim=True)).view(-1, 3, 2).transpose(1, 2).clone()

    found = symbolic(function, torch.rand(5))
    assert not found.report.unsupported
    assert found.graph.varying == 5
    shapes = {node.shape for node in found.graph if node.kind != "constant"}
    assert {(5,), (5, 6), (5, 2, 3)} <= shapes
    assert {size for node in found.graph for size in node.strides} <= {1, 2, 3, 6}


def test_shapes_that_cannot_be_one_size_stay_opaque() -> None:
    two = symbolic(lambda x: x.exp() * 2, torch.rand(4, 6))
    assert {why for why, _ in two.report.unsupported} == {"several dynamic dimensions"}
    half = symbolic(lambda x: x[: x.shape[0] // 2].exp(), torch.rand(8))
    reason = "a size that is no multiple of the dynamic dimension"
    assert reason in {why for why, _ in half.report.unsupported}
    twice = symbolic(lambda x: (x[:, None] * x).exp(), torch.rand(5))
    assert {why for why, _ in twice.report.unsupported} == {
        "the dynamic dimension twice in a tensor"
    }


def test_numbers_that_depend_on_a_size_are_not_taken_as_known() -> None:
    reason = "a number that is known at run time only"
    for function in (
        lambda x: x.mean(),
        lambda x: x.var(),
        lambda x: x[-1].exp(),
        lambda x: x / x.shape[0],
        lambda x: torch.ops.aten.split.Tensor(torch.cat([x, x]), x.shape[0])[1].exp(),
    ):
        found = symbolic(function, torch.rand(5))
        assert found.report.unsupported
        assert reason in {why for why, _ in found.report.unsupported}


def test_uniform_random_numbers_come_from_seeds_in_a_copy() -> None:
    def function(x: Any) -> Any:
        return torch.rand_like(x) + torch.rand(4, 6) * torch.randn_like(x)

    given = traced(function, torch.rand(4, 6))
    before = str(given.graph)
    found = capture(replace_random_ops(given))
    assert str(given.graph) == before
    assert found.report.unsupported == {("random numbers", "aten.randn_like.default"): 1}
    seeds = [node for node in found.graph if node.op == "slice"]
    assert [node["start"] for node in seeds] == [0, 1]
    drawn = [node for node in found.graph if node.op == "random"]
    assert [(node.shape, node["words"]) for node in drawn] == [((4, 6), 4)] * 2


def test_what_only_comparisons_with_probabilities_read_has_16_bits() -> None:
    """And stays fp32, whatever dtype the program has it in: eager PyTorch gives the same masks."""

    def function(x: Any) -> Any:
        made = torch.rand_like(x)  # also behind a cast
        one = (made < 0.75).to(x.dtype) + (made.bfloat16() >= 0.25).to(x.dtype)
        return one + (torch.rand_like(x) > 0.1) * x

    module = replace_random_ops(traced(function, torch.rand(4, 6, dtype=torch.float16)))
    found = capture(module)
    assert not found.report.unsupported
    drawn = [node for node in found.graph if node.op == "random"]
    assert [(node.dtype, node["words"]) for node in drawn] == [("float32", 8)] * 2
    for node in drawn:
        assert {found.graph[user].op for user in found.graph.users[node.index]} <= {
            "lt",
            "ge",
            "gt",
        }
    values = values_of(module)
    seeds = next(values[n] for n in module.graph.nodes if n.target is SEEDS).numpy()
    wanted = interpret(
        Graph(found.graph.nodes, tuple(n.index for n in drawn)), [np.ones((4, 6)), seeds]
    )
    made = [values[n] for n in module.graph.nodes if n.target is UNIFORM]
    assert all((one.numpy() == other).all() for one, other in zip(made, wanted, strict=True))
    dropped = capture(
        replace_random_ops(inference_graph(torch.nn.Dropout(0.1), torch.rand(4, 6)))
    ).graph
    assert [node["words"] for node in dropped if node.op == "random"] == [8]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (torch.rand_like(x) < 1e-4) * x,  # 16 bits would be 5 % off
        lambda x: (torch.rand_like(x) < 0.999) * x,
        lambda x: (torch.rand_like(x) < x) * x,
        lambda x: (torch.rand_like(x) == 0.5) * x,
        lambda x: ((torch.rand_like(x) * 2).to(torch.int32) > 0.5) * x,
        lambda x: (torch.rand_like(x).to(torch.float64) > 0.5) * x,
        lambda x: [made := torch.rand_like(x), (made > 0.5) * x][::-1],
    ],
)
def test_other_random_numbers_have_32_bits(function: Any) -> None:
    graph = capture(replace_random_ops(traced(function, torch.rand(4, 6)))).graph
    assert [node["words"] for node in graph if node.op == "random"] == [4]


def inductors_dropout(device: str) -> Any:
    """As Inductor's graphs have it: one call draws the seeds of all."""
    from torch._inductor import inductor_prims

    graph = torch.fx.Graph()

    def named(node: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        node.meta["val"] = torch.empty(shape, dtype=dtype, device=device)
        return node

    def call(target: Any, args: tuple[Any, ...], shape: tuple[int, ...], dtype: Any) -> Any:
        return named(graph.call_function(target, args), shape, dtype)

    with FakeTensorMode():
        x = named(graph.placeholder("x"), (4, 6), torch.float32)
        seeds = named(graph.placeholder("seeds"), (3,), torch.int64)
        seed = call(inductor_prims.lookup_seed, (seeds, 2), (), torch.int64)
        numbers = call(inductor_prims.random, ([4, 6], seed, "rand"), (4, 6), torch.float32)
        kept = call(torch.ops.aten.gt.Scalar, (numbers, 0.1), (4, 6), torch.bool)
        graph.output(call(torch.ops.aten.mul.Tensor, (x, kept), (4, 6), torch.float32))
    return torch.fx.GraphModule({}, graph)


@pytest.mark.parametrize(("device", "depends"), [("cuda", False), ("cuda", True), ("cpu", False)])
def test_inductors_random_numbers_are_made_where_they_are_the_same(
    device: str, depends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a processor Inductor draws others."""
    from nostall.fusion.capture import random_rules

    monkeypatch.setattr(random_rules, "numbers_depend_on_kernels", lambda: depends)
    found = capture(inductors_dropout(device))
    drawn = [node for node in found.graph if node.op == "random"]
    if device == "cpu" or depends:
        name = ("random numbers", "prims.inductor_random.default")
        assert found.report.unsupported == {name: 1}
        assert drawn == []
        return
    assert not found.report.unsupported
    assert [(node.shape, node.dtype, node["words"]) for node in drawn] == [((4, 6), "float32", 1)]
    pair, seed = [node for node in found.graph if node.op == "slice"]
    assert (pair["start"], pair.shape, seed["start"], seed.shape) == (2, (1,), 0, (1,))
    seeds = np.array([5, 6, 7], dtype=np.int64)
    x = np.ones((4, 6), dtype=np.float32)
    (result,) = interpret(found.graph, [x, seeds])
    assert np.array_equal(result, uniform(7, (4, 6), words=1) > 0.1)


def test_an_opaque_result_keeps_its_strides() -> None:
    found = capture(traced(lambda x: x.transpose(0, 1).lgamma().exp(), torch.rand(4, 6)))
    (opaque,) = [node for node in found.graph if node.kind == "opaque" and node.shape == (6, 4)]
    assert opaque.strides == (1, 6)


def test_tensors_too_large_to_count_stay_opaque() -> None:
    with FakeTensorMode():
        x = torch.empty(2**16, 2**15)
    assert refusals(lambda x: x.exp(), x) == {"more than 2^31 - 1 elements": "aten.exp.default"}


def test_the_explanation_counts() -> None:
    found = capture(traced(lambda x: (x @ x).exp().cumsum(0).cumsum(1) * 2, torch.rand(4, 4)))
    text = str(found.report)
    assert "2 ATen calls can be fused, 3 stay" in text
    assert "2 x aten.cumsum.default: unsupported operator" in text


class Pooling(torch.nn.Module):
    """DIEN's attention: a query weighs the places of its sequence."""

    def forward(self, x: Any, query: Any) -> Any:
        weights = torch.einsum("btd,bd->bt", x, query).softmax(-1)
        return torch.einsum("bt,btd->bd", weights, x)


def test_attention_by_einsum_is_dots_in_both_passes() -> None:
    inputs = [torch.rand(4, 10, 16).requires_grad_(), torch.rand(4, 16).requires_grad_()]
    for module in training_graphs(Pooling(), *inputs):
        found = capture(module)
        assert not found.report.unsupported
        (part,) = find_regions(found.graph)
        assert sum(node.op == "dot" for node in part.graph) >= 2
        of = scheduled(part.graph, part.graph.operators)
        assert of.kind == "dots"


def test_small_products_are_fused_and_exact() -> None:
    def function(a: Any, b: Any) -> Any:
        return torch.bmm(a, b).relu().sum((1, 2))

    module = traced(
        function, torch.rand(8, 3, 4, dtype=torch.float64), torch.rand(8, 4, 2).double()
    )
    found = capture(module)
    assert "dot" in {node.op for node in found.graph}
    assert check(module) == 1


def test_numbers_widen_integers_before_they_are_used() -> None:
    def function(x: Any) -> Any:
        return x.clamp(0.25, 0.75) + torch.add(x, x, alpha=2) + x.pow(3.0) + x.sum() / 7

    module = traced(function, torch.randint(0, 2, (5, 3)))
    found = capture(module)
    assert not found.report.unsupported
    assert check(module, rtol=1e-6) == 1  # integers become fp32 in PyTorch


def test_a_graph_without_shapes_is_refused() -> None:
    module = torch.fx.symbolic_trace(lambda x: x + 1)
    with pytest.raises(BadCapture, match=r"meta\['val'\]"):
        capture(module)


def test_a_module_that_cannot_be_traced_says_why() -> None:
    class Branches(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return x if x.sum() > 0 else -x

    with pytest.raises(BadCapture, match="Branches"):
        inference_graph(Branches(), torch.rand(3))
    with pytest.raises(BadCapture, match="no backward pass"):
        training_graphs(torch.nn.ReLU(), torch.rand(3))


@pytest.mark.parametrize("dim", [1, -1, 0])
def test_gated_linear_units_are_halves(dim: int) -> None:
    module = traced(lambda x: torch.nn.functional.glu(x, dim), torch.randn(4, 6).double())
    found = capture(module)
    assert not found.report.unsupported
    assert check(module) == 1


def test_gated_linear_units_are_rounded_once() -> None:
    """As ATen does it: the sigmoid is not rounded before it scales the other half."""
    found = capture(traced(lambda x: torch.nn.functional.glu(x, 1), torch.randn(4, 6).half()))
    (sigmoid,) = [node for node in found.graph if node.op == "sigmoid"]
    assert (sigmoid.dtype, found.graph[found.graph.outputs[0]].dtype) == ("float32", "float16")


def test_what_inductor_multiplies_and_adds_at_once_are_two_operators() -> None:
    given = [torch.randn(4, 6).double() for _ in range(3)]
    module = traced(lambda *x: torch.ops.prims.fma(*x), *given)
    assert [n.op for n in capture(module).graph if n.kind != "input"] == ["mul", "add"]
    assert check(module) == 1
