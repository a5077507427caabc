"""Capture of random calls: replaced ones, and those of Inductor's graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="capture needs the extra nostall[torch]")


from tools.interpreters.reference import interpret  # noqa: E402

from nostall.fusion.capture import (  # noqa: E402
    capture,
    inference_graph,
)
from nostall.fusion.capture.randomness import SEEDS, UNIFORM, replace_random_ops  # noqa: E402
from nostall.fusion.graph.graph import Graph  # noqa: E402
from tests.unit.fusion.capture.test_randomness import uniform  # noqa: E402
from tests.unit.fusion.capture.tracing import inductor_dropout, traced, values_of  # noqa: E402


def test_uniform_random_calls_are_replaced_in_a_copy() -> None:
    def function(x: Any) -> Any:
        return torch.rand_like(x) + torch.rand(4, 6) * torch.randn_like(x)

    module = traced(function, torch.rand(4, 6))
    original = str(module.graph)
    captured = capture(replace_random_ops(module))
    assert str(module.graph) == original
    assert captured.report.unsupported == {("random numbers", "aten.randn_like.default"): 1}
    seeds = [node for node in captured.graph if node.op == "slice"]
    assert [node["start"] for node in seeds] == [0, 1]
    numbers = [node for node in captured.graph if node.op == "random"]
    assert [(node.shape, node["words"]) for node in numbers] == [((4, 6), 4)] * 2


def test_numbers_that_are_only_compared_have_16_bits() -> None:
    """They are fp32 for any dtype of the program, so eager PyTorch makes the same masks."""

    def function(x: Any) -> Any:
        r = torch.rand_like(x)  # compared directly and after a cast
        masks = (r < 0.75).to(x.dtype) + (r.bfloat16() >= 0.25).to(x.dtype)
        return masks + (torch.rand_like(x) > 0.1) * x

    module = replace_random_ops(traced(function, torch.rand(4, 6, dtype=torch.float16)))
    captured = capture(module)
    assert not captured.report.unsupported
    numbers = [node for node in captured.graph if node.op == "random"]
    assert [(node.dtype, node["words"]) for node in numbers] == [("float32", 8)] * 2
    for node in numbers:
        assert {captured.graph[user].op for user in captured.graph.users[node.index]} <= {
            "lt",
            "ge",
            "gt",
        }
    values = values_of(module)
    seeds = next(values[n] for n in module.graph.nodes if n.target is SEEDS).numpy()
    expected = interpret(
        Graph(captured.graph.nodes, tuple(n.index for n in numbers)), [np.ones((4, 6)), seeds]
    )
    results = [values[n] for n in module.graph.nodes if n.target is UNIFORM]
    assert all((r.numpy() == e).all() for r, e in zip(results, expected, strict=True))
    dropout = capture(
        replace_random_ops(inference_graph(torch.nn.Dropout(0.1), torch.rand(4, 6)))
    ).graph
    assert [node["words"] for node in dropout if node.op == "random"] == [8]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (torch.rand_like(x) < 1e-4) * x,  # 16 bits would change it by 5 %
        lambda x: (torch.rand_like(x) < 0.999) * x,
        lambda x: (torch.rand_like(x) < x) * x,
        lambda x: (torch.rand_like(x) == 0.5) * x,
        lambda x: ((torch.rand_like(x) * 2).to(torch.int32) > 0.5) * x,
        lambda x: (torch.rand_like(x).to(torch.float64) > 0.5) * x,
        lambda x: [r := torch.rand_like(x), (r > 0.5) * x][::-1],
    ],
)
def test_other_random_numbers_have_32_bits(function: Any) -> None:
    graph = capture(replace_random_ops(traced(function, torch.rand(4, 6)))).graph
    assert [node["words"] for node in graph if node.op == "random"] == [4]


@pytest.mark.parametrize(("device", "depends"), [("cuda", False), ("cuda", True), ("cpu", False)])
def test_inductor_random_numbers_are_fused_if_reproducible(
    device: str, depends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, Inductor's numbers are different ones."""
    from nostall.fusion.capture import operator_rules as random_rules

    monkeypatch.setattr(random_rules, "numbers_depend_on_kernels", lambda: depends)
    captured = capture(inductor_dropout(device))
    numbers = [node for node in captured.graph if node.op == "random"]
    if device == "cpu" or depends:
        name = ("random numbers", "prims.inductor_random.default")
        assert captured.report.unsupported == {name: 1}
        assert numbers == []
        return
    assert not captured.report.unsupported
    assert [(node.shape, node.dtype, node["words"]) for node in numbers] == [((4, 6), "float32", 1)]
    pair, seed = [node for node in captured.graph if node.op == "slice"]
    assert (pair["start"], pair.shape, seed["start"], seed.shape) == (2, (1,), 0, (1,))
    seeds = np.array([5, 6, 7], dtype=np.int64)
    x = np.ones((4, 6), dtype=np.float32)
    (result,) = interpret(captured.graph, [x, seeds])
    assert np.array_equal(result, uniform(7, (4, 6), words=1) > 0.1)
