"""Matrix products of whole models: Inductor's graphs without its code generation, and the cases."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from benchmarks.torch_compile.model_zoo.parts import Model
from nostall.attach.torch_compile.measure.product_comparison import ProductCase, product_module
from nostall.attach.torch_compile.rewrite.products import products_of


@dataclass
class Counted:
    """A distinct product, with the models that have it and how often they have it."""

    case: ProductCase
    models: dict[str, int] = field(default_factory=dict)

    @property
    def bytes_saved(self) -> int:
        """Bytes that a kernel saves in all models together."""
        return self.case.found.bytes_saved * sum(self.models.values())


def post_grad_graphs(model: Model, device: str, dtype: torch.dtype) -> list[GraphModule]:
    """The graphs of a model's step behind Inductor's graph passes, which run by eager PyTorch."""
    try:
        return _graphs(model, device, dtype, made_on=device)
    except Exception:  # some modules have to be made on the CPU, which takes seconds longer
        return _graphs(model, device, dtype, made_on="cpu")


def _graphs(model: Model, device: str, dtype: torch.dtype, made_on: str) -> list[GraphModule]:
    torch.manual_seed(0)
    with torch.device(made_on):
        module, inputs = model.make()
    module = module.to(device, dtype)
    inputs = tuple(x.to(device, dtype if x.is_floating_point() else x.dtype) for x in inputs)
    module.train(model.train)
    graphs: list[GraphModule] = []
    torch._dynamo.reset()
    function = torch.compile(module, backend=_observing_backend(graphs), dynamic=False)
    if model.train:
        function(*inputs).float().square().mean().backward()
    else:
        with torch.no_grad():
            function(*inputs)
    del function, module, inputs
    gc.collect()
    return graphs


def _observing_backend(graphs: list[GraphModule]) -> Callable[..., Any]:
    """A backend that adds Inductor's graphs to a list and runs them by eager PyTorch."""
    from functorch.compile import make_boxed_func
    from torch._guards import detect_fake_mode
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.virtualized import V

    def inner(module: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        plain = copy.deepcopy(module)
        with V.set_fake_mode(detect_fake_mode(inputs)):
            view_to_reshape(module)
            post_grad_passes(module, bool(options.get("is_inference")))
        graphs.append(module)
        return make_boxed_func(plain.forward)

    return lambda module, inputs: compile_fx(module, inputs, inner_compile=inner)


def add_cases(
    cases: dict[str, Counted], name: str, graphs: Sequence[GraphModule]
) -> dict[str, int]:
    """Add the products of a model's graphs; returns the reasons against others, counted."""
    refused: dict[str, int] = {}
    for module in graphs:
        captured_and_products = products_of(module)
        if captured_and_products is None:
            continue
        captured, products = captured_and_products
        for found in products.found:
            key = found.kernel.graph.key
            if key not in cases:
                cases[key] = Counted(ProductCase(found, product_module(module, captured, found)))
            models = cases[key].models
            models[name] = models.get(name, 0) + 1
        for reason, count in products.refused.items():
            refused[reason] = refused.get(reason, 0) + count
    return refused
