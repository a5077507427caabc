"""Random graphs around small batched dots: a Hypothesis strategy.

A dot, operators of attention (scale, mask, softmax along either axis, dropout), optionally a second
dot on either side, and a final operator. Inputs have any memory layout and axes of size 1, and some
intermediate values are outputs.
"""

from __future__ import annotations

from hypothesis import strategies as st

from nostall.fusion.graph.builder import Builder
from nostall.fusion.graph.shapes import contiguous_strides
from tests.unit.fusion.codegen.graphs.random_graphs import RandomGraph

SIZES = (1, 2, 5, 16, 17, 24)
BATCHES = ((3,), (2, 2), (1, 4))


@st.composite
def small_dots(draw: st.DrawFn, floats: tuple[str, ...] = ("float32", "float16")) -> RandomGraph:
    """Graphs whose operators must form one kernel."""
    build, dtype = Builder(), draw(st.sampled_from(floats))
    batch = draw(st.sampled_from(BATCHES))
    transpose = (*range(len(batch)), len(batch) + 1, len(batch))

    def matrix(rows: int, columns: int, kind: str = dtype) -> int:
        """An input (batch, rows, columns), possibly permuted in memory or shared by heads."""
        shape = (*batch, rows, columns)
        order = draw(st.permutations(range(len(shape))))
        laid = contiguous_strides(tuple(shape[axis] for axis in order))
        strides = tuple(laid[order.index(axis)] for axis in range(len(shape)))
        layout = draw(st.sampled_from(("any", "transposed", "shared")))
        if layout == "any":
            return build.input(shape, kind, strides)
        if layout == "shared":
            shared = build.input((*batch[:-1], 1, rows, columns), kind)
            return build("expand", shared, shape=shape)
        transposed = build.input((*batch, columns, rows), kind)
        return build("permute", transposed, dims=transpose)

    m, n, width = (draw(st.sampled_from(SIZES)) for _ in range(3))
    k = draw(st.sampled_from(SIZES[1:]))
    scores = build("dot", matrix(m, k), matrix(k, n))
    if draw(st.booleans()):
        hidden = build.input((batch[0], *(1,) * len(batch), n), "bool")
        scores = build("where", hidden, build.constant(-100.0), scores, dtype=dtype)
    outputs = [scores] if draw(st.booleans()) else []
    value = scores
    if draw(st.booleans()):
        axis = (len(batch) + draw(st.integers(0, 1)),)
        high = build("amax", value, dims=axis, keepdim=True)
        powers = build("exp", build("sub", value, high))
        value = build("div", powers, build("sum", powers, dims=axis, keepdim=True))
    else:
        value = build("mul", value, build.constant(0.5))
    if draw(st.booleans()):
        seed = build.input((1,), "int64")
        shape, words = build.nodes[value].shape, draw(st.sampled_from((4, 8, 1)))
        drawn = build("random", seed, shape=shape, dtype="float32", words=words)
        kept = build("lt", drawn, build.constant(0.75))
        value = build("where", kept, value, build.constant(0.0))
    if draw(st.booleans()):
        value = build("cast", value, dtype=dtype)
    if draw(st.booleans()):
        value, m, n = build("permute", value, dims=transpose), n, m
    side = draw(st.sampled_from(("left", "right", "none")))
    if side == "left":
        value = build("dot", value, matrix(n, width))
    elif side == "right":
        value = build("dot", matrix(width, m), value)
    if draw(st.booleans()):
        axes = draw(st.sampled_from([(0,), (1,), (0, 1)]))
        dims = tuple(len(batch) + axis for axis in axes)
        value = build("sum", value, dims=dims, keepdim=draw(st.booleans()))
    else:
        value = build("tanh", value)
    return RandomGraph(build.graph(*dict.fromkeys([*outputs, value])), draw(st.integers(0, 2**16)))
