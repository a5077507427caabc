"""Tests of the graphs of ``benchmarks.fusion.correctness.random_graphs``, also in bf16."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from benchmarks.fusion.correctness.random_graphs import FLOATS, draw_graphs

from tests.unit.fusion.codegen.graphs.random_graphs import BFLOAT16, FLOAT16, RandomGraph


def test_drawn_graphs_depend_on_the_seed_only() -> None:
    seen: list[RandomGraph] = []
    digest = draw_graphs(20, 0, FLOATS, seen.append)
    assert len(seen) == 20
    assert draw_graphs(20, 0, FLOATS, lambda made: None) == digest
    assert draw_graphs(20, 1, FLOATS, lambda made: None) != digest


def test_conversion_to_bf16_changes_fp16_only() -> None:
    seen: list[RandomGraph] = []
    draw_graphs(60, 0, FLOATS, seen.append)
    pairs = [(made, made.as_bfloat16) for made in seen]
    assert sum(converted is not None for _, converted in pairs) > 20
    for made, converted in pairs:
        fp16_nodes = [node for node in made.graph if node.dtype == FLOAT16]
        if converted is None:
            assert not fp16_nodes
            continue
        assert fp16_nodes and converted.seed == made.seed
        for node, converted_node in zip(made.graph, converted.graph, strict=True):
            assert (node.op, node.inputs, node.shape) == (
                converted_node.op,
                converted_node.inputs,
                converted_node.shape,
            )
            assert node.strides == converted_node.strides
            assert converted_node.dtype == (BFLOAT16 if node.dtype == FLOAT16 else node.dtype)
            assert FLOAT16 not in dict(converted_node.attributes).values()
