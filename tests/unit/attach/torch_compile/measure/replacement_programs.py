"""A product and a stitched kernel for its reader in Triton's interpreter, with given times.

``python -m tests.unit.attach.torch_compile.measure.replacement_programs FOLDER`` prints as JSON
what is chosen, by case.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from tools.interpreters.triton_interpreter import prepare
from torch import Tensor
from torch.nn import functional

from nostall.attach.torch_compile.measure.baselines import copy_graph
from nostall.attach.torch_compile.measure.kernel_comparison import KernelComparisons
from nostall.attach.torch_compile.measure.product_comparison import ProductComparisons
from nostall.attach.torch_compile.measure.product_replacement import replace_kernels
from nostall.attach.torch_compile.options import Options
from nostall.attach.torch_compile.rewrite.compilers import EagerCompiler
from nostall.attach.torch_compile.rewrite.kernel_selection import KernelFilter, RewriteResult
from nostall.attach.torch_compile.rewrite.rewrite import insert_all
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.fusion.capture import training_graphs
from tests.unit.attach.torch_compile.measure.product_programs import FixedTimes
from tests.unit.fusion.products.programs import AsModule, tensors

SHAPES = ((32, 16), (16, 32), (32,), (32, 16))


def with_bias(x: Tensor, first: Tensor, bias: Tensor, second: Tensor) -> Tensor:
    """A layer whose gradient of the bias is a sum over the derivative behind a product."""
    return functional.gelu(functional.linear(x, first.t(), bias)) @ second


def outcome(
    kernel_seconds: float, *, is_measured: bool = True, product_seconds: float = 30.0
) -> dict[str, Any]:
    """What becomes of the backward pass; Inductor's code takes 1 s, the product's kernel 0.5 s."""
    inputs = [x.requires_grad_() for x in tensors(*SHAPES, dtype=torch.float32)]
    graph = training_graphs(AsModule(with_bias), *inputs)[1]
    clock, compiler = FixedTimes(0.5), EagerCompiler()
    options = Options(product_seconds=product_seconds)
    stitched = KernelComparisons(FixedTimes(kernel_seconds), options, {})
    products = ProductComparisons(clock, options, {})
    stitched.add(graph)
    products.add(graph)
    kept = stitched.kept_in_inductor(compiler, 1000.0) if is_measured else frozenset()
    kernel_filter = KernelFilter(kept_in_inductor=kept)
    chosen = products.chosen(compiler, kernel_filter)
    found = replace_kernels(products, stitched.records, compiler, kernel_filter, chosen)
    kernel_filter = KernelFilter(kept_in_inductor=kept | found.kernels)
    regions = products.chosen(compiler, kernel_filter, found.regions)
    changed, result = copy_graph(graph), RewriteResult()
    kernel_filter = KernelFilter(
        kept_in_inductor=kept | found.kernels, regions=regions, products=True
    )
    insert_all(changed, KernelStore(), kernel_filter, result)
    arguments = [torch.randn(x.meta["val"].shape) for x in graph.graph.find_nodes(op="placeholder")]
    pairs = zip(graph(*arguments), changed(*arguments), strict=True)
    return {
        "before": len(chosen),
        "replaced": len(found.kernels),
        "products": len(regions),
        "kernels": len(result.kernels),
        "sums": sum("aten.sum" in str(node.target) for node in changed.graph.nodes),
        "lines": products.lines,
        "asked": clock.asked,
        "difference": max(float((a - b).abs().max()) for a, b in pairs),
    }


def main(folder: str) -> dict[str, Any]:
    prepare()
    torch.set_float32_matmul_precision("high")
    cases: dict[str, dict[str, Any]] = {
        "product": {"kernel_seconds": 0.8},
        "kernel": {"kernel_seconds": 0.3},
        "slow kernel": {"kernel_seconds": 1.0},
        "unmeasured": {"kernel_seconds": 0.8, "is_measured": False},
        "late": {"kernel_seconds": 0.8, "product_seconds": 1e-9},
    }
    result = {}
    for name, case in cases.items():
        os.environ["NOSTALL_HOME"] = f"{folder}/{name}"
        result[name] = outcome(**case)
    return result


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
