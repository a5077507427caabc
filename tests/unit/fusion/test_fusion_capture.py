"""PyTorch programs as operator graphs: same values, honest borders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="capture needs the extra nostall[torch]")

from benchmarks.fusion_models import models  # noqa: E402

from nostall.fusion.capture import (  # noqa: E402
    capture,
    inference_graph,
    training_graphs,
)
from nostall.fusion.reference import interpret  # noqa: E402
from nostall.fusion.regions import regions  # noqa: E402


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


def check(module: Any) -> int:
    """Every region of the graph gives what PyTorch gives; returns how many regions there are."""
    found = capture(module)
    values = values_of(module)

    def array(index: int) -> Any:
        return values[found.origins[index]].detach().numpy()

    parts = regions(found.graph)
    assert found.graph.is_acyclic(
        [[part.origins[i] for i in part.graph.operators] for part in parts]
    )
    for part in parts:
        results = interpret(part.graph, [array(index) for index in part.reads])
        for index, result in zip(part.gives, results, strict=True):
            wanted = array(index)
            assert (
                wanted.strides == tuple(s * wanted.itemsize for s in found.graph[index].strides)
                or wanted.size < 2
            )
            np.testing.assert_allclose(result, wanted, rtol=1e-9, atol=1e-11)
    return len(parts)


@pytest.mark.parametrize("name", models(small=True))
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
