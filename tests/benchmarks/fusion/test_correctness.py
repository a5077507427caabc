"""The graphs of ``benchmarks.fusion.correctness.random_graphs``: the same everywhere, and once more in bf16."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from benchmarks.fusion.correctness.random_graphs import FLOATS, drawn_graphs

from tests.unit.fusion.codegen.random_graphs import BFLOAT16, FLOAT16, RandomGraph


def test_graphs_are_drawn_the_same_whatever_is_done_with_them() -> None:
    seen: list[RandomGraph] = []
    digest = drawn_graphs(20, 0, FLOATS, seen.append)
    assert len(seen) == 20
    assert drawn_graphs(20, 0, FLOATS, lambda made: None) == digest
    assert drawn_graphs(20, 1, FLOATS, lambda made: None) != digest


def test_in_bf16_a_graph_is_the_same_but_for_fp16() -> None:
    seen: list[RandomGraph] = []
    drawn_graphs(60, 0, FLOATS, seen.append)
    twins = [(made, made.as_bfloat16) for made in seen]
    assert sum(twin is not None for _, twin in twins) > 20
    for made, twin in twins:
        halves = [node for node in made.graph if node.dtype == FLOAT16]
        if twin is None:
            assert not halves
            continue
        assert halves and twin.seed == made.seed
        for one, other in zip(made.graph, twin.graph, strict=True):
            assert (one.op, one.inputs, one.shape) == (other.op, other.inputs, other.shape)
            assert one.strides == other.strides
            assert other.dtype == (BFLOAT16 if one.dtype == FLOAT16 else one.dtype)
            assert FLOAT16 not in dict(other.attributes).values()
