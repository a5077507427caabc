"""Kernels of products in Triton's interpreter, compared with fp64.

``python -m tests.unit.fusion.products.interpreted FOLDER EXAMPLES`` prints as JSON the errors of
drawn products and of a kernel that was damaged on purpose. The interpreter computes dots of bf16
wrongly, so the products are fp32 and fp16.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from tools.interpreters.triton_interpreter import prepare
from torch import Tensor

from nostall.fusion.codegen.runtime import eager
from nostall.fusion.codegen.runtime.kernel import load_kernel
from nostall.fusion.codegen.tiling.product_config import ProductConfig
from nostall.fusion.graph.builder import Builder
from nostall.fusion.products.emit import emit_products
from nostall.fusion.products.product_graph import ProductGraph
from tests.unit.fusion.codegen.accuracy import random_inputs
from tests.unit.fusion.codegen.interpreted.interpreting import examples_of

MAX_ERROR = {"float32": 3e-5, "float16": 6e-3}
"""Largest difference from fp64 relative to the largest value, by dtype."""

CONFIGS = (
    ProductConfig(16, 32, 16, 4, 2, group=2),
    ProductConfig(32, 16, 32, 4, 3, parts=2),
    ProductConfig(16, 16, 16, 4, 2, descriptors=True),
    ProductConfig(16, 32, 16, 4, 2, descriptors=True, persistent=True, parts=4),
)


@st.composite
def products(draw: Any) -> ProductGraph:
    """One or two products with operands in any layout, and operators of each kind around them."""
    build = Builder()
    dtype = draw(st.sampled_from(("float32", "float16")))
    # Descriptors need sizes and strides that are multiples of 16 bytes.
    sizes, pads = draw(st.sampled_from((((2, 7, 24, 33), (0, 3, 8)), ((16, 24, 40), (0, 8)))))
    rows, columns, depth = (draw(st.sampled_from(sizes)) for _ in range(3))
    left, scale = _left_operand(draw, build, rows, depth, dtype, pads)
    values = []
    for _ in range(draw(st.sampled_from((1, 2)))):
        right = _operand(draw, build, depth, columns, dtype, pads)
        total = build("dot", left, right, dtype="float32")
        if draw(st.booleans()):
            total = build("add", total, build.input((columns,), dtype), dtype="float32")
        op = "copy" if dtype == "float32" else "cast"
        values.append(build(op, total, dtype=dtype))
    split = next(n for n in (4, 3, 1) if rows % n == 0)
    shape = (split, rows // split, columns)
    views = [build("view", value, shape=shape) for value in values]
    result = build("mul", views[0], build("sigmoid", views[-1]))
    others = {
        "residual": (split, rows // split, columns),
        "row": (split, 1, columns),
        "column": (rows // split, 1),
        "nothing": (),
    }
    other = others[draw(st.sampled_from([*others]))]
    result = build("add", result, build.input(other, dtype))
    if scale is not None and columns == depth:
        result = build("mul", result, build("sigmoid", scale))
    is_kept = draw(st.booleans())
    outputs = [result, *(values if is_kept else [])]
    for dims in draw(st.sampled_from(((), ((0, 1),), ((2,),), ((2,), (0, 1))))):
        reduced = build(draw(st.sampled_from(("sum", "amax"))), result, dims=dims, keepdim=True)
        outputs.append(build("mul", reduced, build.constant(0.5)))
    return ProductGraph(build.graph(*outputs))


def _left_operand(
    draw: Any, build: Builder, rows: int, depth: int, dtype: str, pads: tuple[int, ...]
) -> tuple[int, int | None]:
    """A left operand that is read or computed, and a vector that the prologue reads, if any."""

    def operand(dtype: str = dtype) -> int:
        return _operand(draw, build, rows, depth, dtype, pads)

    kind = draw(
        st.sampled_from(("read", "gated", "scaled", "cast", "transposed", "halves", "views"))
    )
    vector = None
    if kind == "read":
        return operand(), None
    if kind == "gated":
        value = build("mul", operand(), build("sigmoid", operand()))
    elif kind == "scaled":
        row, vector = build("sigmoid", build.input((rows, 1))), build.input((depth,))
        value = build("mul", build("cast", operand(), dtype="float32"), row)
        value = build("cast", build("mul", value, build("sigmoid", vector)), dtype=dtype)
    elif kind == "cast":
        value = build("cast", operand("float32" if dtype == "float16" else "float16"), dtype=dtype)
    elif kind == "transposed":
        transposed = build("sigmoid", _operand(draw, build, depth, rows, dtype, pads))
        value = build("permute", transposed, shape=(rows, depth), dims=(1, 0))
    elif kind == "halves":
        whole = build.input((rows, 2 * depth), dtype)
        first, second = (
            build("slice", whole, shape=(rows, depth), dim=1, start=start, step=1)
            for start in (0, depth)
        )
        value = build("mul", first, build("sigmoid", second))
    else:
        heads = next(n for n in (4, 3, 1) if depth % n == 0)
        mask = build.input((1, rows, heads, 1), "bool")
        whole = build.input((1, rows, heads, depth // heads), dtype)
        masked = build("where", mask, whole, build.constant(0.25))
        value = build("view", masked, shape=(rows, depth))
    return build("copy", value, dtype=dtype), vector


def _operand(
    draw: Any, build: Builder, rows: int, columns: int, dtype: str, pads: tuple[int, ...]
) -> int:
    """A matrix that is row-major or column-major, whose rows may be padded."""
    pad = draw(st.sampled_from(pads))
    by_rows = draw(st.booleans())
    strides = (columns + pad, 1) if by_rows else (1, rows + pad)
    return build.input((rows, columns), dtype, strides)


def exact_outputs(product: ProductGraph, inputs: list[Tensor]) -> list[Tensor]:
    """The outputs by PyTorch's operators in fp64."""
    graph, cpu = product.graph, torch.device("cpu")
    values: dict[int, Any] = {i: _widened(x) for i, x in zip(graph.inputs, inputs, strict=True)}
    for index in graph.operators:
        node = replace(graph[index], dtype="float64")
        operands = [_widened(eager.read_value(graph, i, values, None, cpu)) for i in node.inputs]
        values[index] = eager.run_operator(node, operands)
    return [values[index] for index in graph.outputs]


def _widened(value: Tensor) -> Tensor:
    return value.double() if value.dtype.is_floating_point else value


def errors_of(
    product: ProductGraph,
    config: ProductConfig,
    folder: Path,
    change: Callable[[str], str] | None = None,
) -> Iterator[str]:
    """Wrong outputs of one kernel as text; ``change`` damages its source."""
    program = emit_products(product, config)
    if change is not None:
        program = replace(program, source=change(program.source))
    inputs = random_inputs(product.graph, 1)
    by_node = dict(zip(product.graph.inputs, inputs, strict=True))
    kernel = load_kernel(program, folder)
    made = kernel(*(by_node[i] for i in program.inputs), device=torch.device("cpu"))
    for index, result, exact in zip(
        program.outputs, made, exact_outputs(product, inputs), strict=True
    ):
        dtype = product.graph[index].dtype
        error = float((result.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-3))
        if not error < MAX_ERROR[dtype]:
            text = f"{product.graph.describe(index)} is off by {error:.3g}"
            yield f"{config}: {text}\n{product.graph}"


def damaged_errors(folder: Path) -> list[str]:
    """Errors of kernels that leave out a part of the depth, and compute a part of it twice."""
    damages = {
        False: ("tl.range(0, 40, ", "tl.range(0, 16, "),
        True: ("e = k + d[None, :]", "e = d[None, :]"),
    }
    found: list[str] = []
    for is_computed, (text, damaged) in damages.items():
        build = Builder()
        left, right = build.input((16, 40)), build.input((40, 16))
        left = build("copy", build("tanh", left)) if is_computed else left
        value = build("copy", build("dot", left, right))
        product = ProductGraph(build.graph(build("sigmoid", value)))
        found += errors_of(
            product, CONFIGS[0], folder, lambda source, a=text, b=damaged: source.replace(a, b)
        )
    return found


def main(folder: Path, examples: int) -> dict[str, Any]:
    prepare()
    wrong: list[str] = []
    seen = {"configurations": 0, "pairs": 0, "descriptors": 0, "prologues": 0, "sums": 0}

    @examples_of(examples)
    @given(products())
    def check(product: ProductGraph) -> None:
        for config in CONFIGS:
            if config.descriptors and not product.shape.descriptors:
                continue
            seen["configurations"] += 1
            seen["pairs"] += len(product.dots) == 2
            seen["descriptors"] += config.descriptors
            seen["prologues"] += bool(product.prologue)
            seen["sums"] += len(product.reductions)
            wrong.extend(errors_of(product, config, folder))

    check()
    return {"wrong": wrong, "seen": seen, "damaged": damaged_errors(folder)}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
