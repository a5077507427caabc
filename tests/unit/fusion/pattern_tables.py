"""Tables of the graphs that tests run: of a dynamic size, packed, and of fixed sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nostall.fusion.graph.graph import Graph
from tests.unit.fusion.patterns import (
    attention,
    attention_backward,
    bias_gelu,
    broadcast_sum,
    column_sum,
    counter_comparisons,
    cross_entropy,
    disjoint_union,
    double_norm,
    dropout_residual,
    gated,
    head_norms,
    heads,
    layer_norm,
    masked_softmax,
    mean_loss,
    norm_backward,
    normed_gelu,
    pooling,
    projected_attention,
    quantised,
    quantised_gradient,
    quantised_norm,
    softmax_outer,
    weighed_history,
)

ROWS = 7
"""Placeholder prime of the dynamic size in the graphs of :data:`DYNAMIC`."""


def _varying(graph: Graph) -> Graph:
    return replace(graph, varying=ROWS)


DYNAMIC: dict[str, Callable[[], Graph]] = {
    "layer norm": lambda: _varying(layer_norm((ROWS, 2, 100), "float16")),
    "masked softmax": lambda: _varying(masked_softmax((ROWS, 1, 4, 48), "float16")),
    "softmax of an outer axis": lambda: _varying(softmax_outer((ROWS, 24, 5), "float32")),
    "norm backward": lambda: _varying(norm_backward((ROWS, 3, 80), "float16")),
    "bias and gelu": lambda: _varying(bias_gelu((ROWS, 48), "float16")),
    "quantised norm": lambda: _varying(quantised_norm((ROWS, 2, 256), "float16", 32)),
    "gated": lambda: _varying(gated((ROWS, 3, 30), "float16")),
    "heads": lambda: _varying(heads((ROWS, 2, 64), "float16")),
    "dropout": lambda: _varying(dropout_residual((ROWS, 3, 30), "float32")),
    "attention": lambda: _varying(attention((ROWS, 2, 9, 24), "float32")),
    "weighed history": lambda: _varying(weighed_history((ROWS, 6, 32), "float16")),
    "attention pooling": lambda: _varying(pooling((ROWS, 10, 24), "float16")),
}

PACKED: dict[str, Callable[[], Graph]] = {
    "three": lambda: disjoint_union(
        layer_norm((5, 100), "float16"),
        gated((3, 30), "float16"),
        softmax_outer((2, 24, 5), "float32"),
    ),
    "dynamic": lambda: disjoint_union(
        _varying(bias_gelu((ROWS, 48), "float16")),
        layer_norm((3, 40), "float32"),
        heads((ROWS, 2, 64), "float16"),
    ),
}


PATTERNS: dict[str, Callable[[], Graph]] = {
    "layer norm": lambda: layer_norm((2, 3, 100), "float16"),
    "layer norm, two chunks": lambda: layer_norm((3, 300), "float32"),
    "double norm": lambda: double_norm((3, 160), "float16"),
    "masked softmax": lambda: masked_softmax((2, 1, 4, 48), "float16"),
    "softmax of an outer axis": lambda: softmax_outer((2, 24, 5), "float32"),
    "norm backward": lambda: norm_backward((2, 3, 80), "float16"),
    "mean loss": lambda: mean_loss((7, 70), "float16"),
    "bias and gelu": lambda: bias_gelu((7, 90), "float16"),
    "normed gelu": lambda: normed_gelu((3, 160), "float16"),
    "picked": lambda: cross_entropy((3, 700), "float16"),
    "quantised": lambda: quantised((5, 300), "float16"),
    "quantised norm": lambda: quantised_norm((2, 2, 640), "float16", 64),
    "head norms": lambda: head_norms((3, 1152), "float16", 9),
    "quantised gradient": lambda: quantised_gradient((9, 320), "float16", 32),
    "gated": lambda: gated((2, 3, 30), "float16"),
    "heads": lambda: heads((2, 1, 64), "float16"),
    "comparisons with a counter": lambda: counter_comparisons(7, 12),
    "dropout": lambda: dropout_residual((3, 90), "float16"),
    "column sum": lambda: column_sum((530, 12), "float32"),
    "sum of a broadcast": lambda: broadcast_sum((6, 39), "float32"),
    "attention": lambda: attention((2, 3, 10, 24), "float16"),
    "projected attention": lambda: projected_attention((2, 2, 9, 16), "float32"),
    "attention backward": lambda: attention_backward((2, 2, 12, 20), "float32"),
    "attention pooling": lambda: pooling((4, 10, 24), "float16"),
    "weighed history": lambda: weighed_history((3, 10, 64), "float16"),
    "weighed history, odd": lambda: weighed_history((3, 10, 24), "float16"),
}
