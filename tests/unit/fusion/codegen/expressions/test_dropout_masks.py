"""Comparisons of 16-bit random numbers as whole words, for each of the 65,536 there are."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nostall.fusion import Builder
from nostall.fusion.codegen.expressions.dropout_masks import (
    half_comparison,
    half_value,
    is_deferred_product,
    is_only_compared,
)
from nostall.fusion.codegen.expressions.helpers import used_helpers
from nostall.fusion.codegen.expressions.templates import Value
from nostall.fusion.codegen.generate import generate
from nostall.fusion.graph.graph import Graph

OPS = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
HALVES = np.arange(2**16, dtype=np.uint32)
NUMBERS = ((HALVES + 0.5) / 2**16).astype(np.float32)
OTHER_BITS = np.random.default_rng(0).integers(0, 2**16, 2**16, dtype=np.uint32)


def _limits() -> list[float]:
    """All kinds of numbers to compare with, and some of the random ones and their neighbours."""
    strange = [0.0, -0.0, 1.0, -1.0, 2.0, 1e-30, -1e-30, 1e300, -1e300, 5e-324, math.nan]
    near = [NUMBERS[h] for h in (0, 1, 6553, 32767, 32768, 65534, 65535)]
    above, below = (np.nextafter(near, np.float32(side)) for side in (2, -2))
    some = np.random.default_rng(1).uniform(-0.1, 1.1, 50)
    whole = [h / 2**16 for h in (0, 1, 2, 6554, 65535)]
    return [*strange, math.inf, -math.inf, *map(float, (*near, *above, *below, *some, *whole))]


def _compared(op: str, *operands: Value) -> Any:
    """What the text of a comparison says of each number."""
    build = Builder()
    one, two = build.input((4,)), build.input((4,))
    node = build.graph(build(op, one, two)).nodes[-1]
    value = half_comparison(node, operands)
    assert value is not None and value.dtype == "bool"
    return eval(value.text, {"word": HALVES << 16 | OTHER_BITS})


@pytest.mark.parametrize("op", OPS)
def test_words_are_compared_as_their_numbers_would_be(op: str) -> None:
    for limit in _limits():
        number = Value(repr(limit), "float32", limit)
        with np.errstate(over="ignore"):
            small = np.float32(limit)
        right = OPS[op](NUMBERS, small)
        assert (_compared(op, half_value("word"), number) == right).all(), limit
        turned = OPS[op](small, NUMBERS)
        assert (_compared(op, number, half_value("word")) == turned).all(), limit


class _Words(np.ndarray[Any, Any]):
    def to(self, dtype: Any, bitcast: bool) -> Any:
        assert bitcast
        return np.asarray(self).view(dtype)


def test_half_a_word_becomes_its_number_exactly() -> None:
    names: dict[str, Any] = {"tl": SimpleNamespace(float32=np.float32)}
    (text,) = used_helpers("_number_of(")
    exec(text.replace("@triton.jit\n", ""), names)
    found = names["_number_of"]((HALVES << 16 | OTHER_BITS).view(_Words))
    assert found.dtype == np.float32 and (found == NUMBERS).all()


def _drawn(limit: float, kept_too: bool = False, scale: float = 1.25) -> tuple[Graph, int, int]:
    """Dropout, with its random numbers and the product with its mask."""
    build = Builder()
    x, seed = build.input((8, 64)), build.input((1,), "int64")
    drawn = build("random", seed, shape=(8, 64), dtype="float32", words=8)
    masked = build("mul", build("gt", drawn, build.constant(limit)), x)
    made = build("mul", masked, build.constant(scale))
    return build.graph(made, *([drawn, masked] if kept_too else [])), drawn, masked


def test_no_number_is_made_of_what_is_compared_only() -> None:
    graph, drawn, masked = _drawn(0.25)
    assert is_only_compared(graph, drawn) and is_deferred_product(graph, masked)
    source = generate(graph, graph.operators).source
    assert "_number_of" not in source and f"v{drawn} >= {2**30}" in source
    kept, drawn, masked = _drawn(0.25, kept_too=True)
    assert not is_only_compared(kept, drawn) and not is_deferred_product(kept, masked)
    assert "_number_of" in generate(kept, kept.operators).source


@pytest.mark.parametrize("scale", [0.0, -2.0, math.inf, math.nan])
def test_what_is_dropped_is_scaled_apart_by_strange_numbers(scale: float) -> None:
    graph, _, masked = _drawn(0.25, scale=scale)
    assert not is_deferred_product(graph, masked)


def test_one_product_is_what_two_are() -> None:
    x = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, -1e-40, 0.0, -0.0, 0.7, -5])
    x = np.concatenate([x, np.random.default_rng(2).normal(size=1000)]).astype(np.float32)
    with np.errstate(all="ignore"):
        for scale in np.array([1 / 0.9, 1e-40, 3e38, 1.0], np.float32):
            for mask in (False, True):
                one = x * np.where(mask, scale, np.float32(0))
                two = (np.float32(mask) * x) * scale
                assert one.dtype == two.dtype == np.float32
                assert (np.isnan(one) == np.isnan(two)).all()
                real = ~np.isnan(one)
                assert (one.view(np.int32)[real] == two.view(np.int32)[real]).all()
