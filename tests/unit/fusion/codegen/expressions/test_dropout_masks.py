"""Peephole rewrites of dropout, with comparisons tested for all 65,536 random numbers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nostall.fusion import Builder
from nostall.fusion.codegen.expressions.helpers import used_helpers
from nostall.fusion.codegen.expressions.peephole import (
    half_comparison,
    half_value,
    is_deferred_product,
    is_only_compared,
)
from nostall.fusion.codegen.expressions.templates import Value
from nostall.fusion.codegen.generate import generate
from nostall.fusion.graph.graph import Graph

OPS = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
HALVES = np.arange(2**16, dtype=np.uint32)
NUMBERS = ((HALVES + 0.5) / 2**16).astype(np.float32)
OTHER_BITS = np.random.default_rng(0).integers(0, 2**16, 2**16, dtype=np.uint32)


def _limits() -> list[float]:
    """Constants to compare with: special values, random numbers and their fp32 neighbours."""
    special = [0.0, -0.0, 1.0, -1.0, 2.0, 1e-30, -1e-30, 1e300, -1e300, 5e-324, math.nan]
    near = [NUMBERS[h] for h in (0, 1, 6553, 32767, 32768, 65534, 65535)]
    above, below = (np.nextafter(near, np.float32(side)) for side in (2, -2))
    some = np.random.default_rng(1).uniform(-0.1, 1.1, 50)
    edges = [h / 2**16 for h in (0, 1, 2, 6554, 65535)]
    return [*special, math.inf, -math.inf, *map(float, (*near, *above, *below, *some, *edges))]


def _evaluate_comparison(op: str, *operands: Value) -> Any:
    """The result of the comparison's text for each of the random numbers."""
    build = Builder()
    x, y = build.input((4,)), build.input((4,))
    node = build.graph(build(op, x, y)).nodes[-1]
    value = half_comparison(node, operands)
    assert value is not None and value.dtype == "bool"
    return eval(value.text, {"word": HALVES << 16 | OTHER_BITS})


@pytest.mark.parametrize("op", OPS)
def test_word_comparisons_equal_float_comparisons(op: str) -> None:
    for limit in _limits():
        number = Value(repr(limit), "float32", limit)
        with np.errstate(over="ignore"):
            limit_fp32 = np.float32(limit)
        expected = OPS[op](NUMBERS, limit_fp32)
        assert (_evaluate_comparison(op, half_value("word"), number) == expected).all(), limit
        mirrored = OPS[op](limit_fp32, NUMBERS)
        assert (_evaluate_comparison(op, number, half_value("word")) == mirrored).all(), limit


class _Words(np.ndarray[Any, Any]):
    def to(self, dtype: Any, bitcast: bool) -> Any:
        assert bitcast
        return np.asarray(self).view(dtype)


def test_a_half_word_converts_to_its_number_exactly() -> None:
    names: dict[str, Any] = {"tl": SimpleNamespace(float32=np.float32)}
    (text,) = used_helpers("_number_of(")
    exec(text.replace("@triton.jit\n", ""), names)
    numbers = names["_number_of"]((HALVES << 16 | OTHER_BITS).view(_Words))
    assert numbers.dtype == np.float32 and (numbers == NUMBERS).all()


def _dropout(
    limit: float, has_extra_outputs: bool = False, scale: float = 1.25
) -> tuple[Graph, int, int]:
    """A dropout graph, the node of its random numbers and that of mask * x.

    ``has_extra_outputs`` makes both nodes outputs of the graph.
    """
    build = Builder()
    x, seed = build.input((8, 64)), build.input((1,), "int64")
    random = build("random", seed, shape=(8, 64), dtype="float32", words=8)
    masked = build("mul", build("gt", random, build.constant(limit)), x)
    scaled = build("mul", masked, build.constant(scale))
    outputs = [scaled, random, masked] if has_extra_outputs else [scaled]
    return build.graph(*outputs), random, masked


def test_random_numbers_that_are_only_compared_are_not_converted() -> None:
    graph, random, masked = _dropout(0.25)
    assert is_only_compared(graph, random) and is_deferred_product(graph, masked)
    source = generate(graph, graph.operators).source
    assert "_number_of" not in source and f"v{random} >= {2**30}" in source
    graph, random, masked = _dropout(0.25, has_extra_outputs=True)
    assert not is_only_compared(graph, random) and not is_deferred_product(graph, masked)
    assert "_number_of" in generate(graph, graph.operators).source


@pytest.mark.parametrize("scale", [0.0, -2.0, math.inf, math.nan])
def test_products_with_a_scale_that_is_not_positive_and_finite_are_not_deferred(
    scale: float,
) -> None:
    graph, _, masked = _dropout(0.25, scale=scale)
    assert not is_deferred_product(graph, masked)


def test_the_merged_product_is_bit_identical_to_two_products() -> None:
    x = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, -1e-40, 0.0, -0.0, 0.7, -5])
    x = np.concatenate([x, np.random.default_rng(2).normal(size=1000)]).astype(np.float32)
    with np.errstate(all="ignore"):
        for scale in np.array([1 / 0.9, 1e-40, 3e38, 1.0], np.float32):
            for mask in (False, True):
                merged = x * np.where(mask, scale, np.float32(0))
                expected = (np.float32(mask) * x) * scale
                assert merged.dtype == expected.dtype == np.float32
                assert (np.isnan(merged) == np.isnan(expected)).all()
                real = ~np.isnan(merged)
                assert (merged.view(np.int32)[real] == expected.view(np.int32)[real]).all()
