"""Operator graphs of common chains (norms, softmax, attention), small enough to interpret."""

from __future__ import annotations

from dataclasses import replace

from nostall.fusion.graph.builder import Builder
from nostall.fusion.graph.graph import Graph, Node

Shape = tuple[int, ...]


def _normed(build: Builder, x: int, axis: int, eps: float = 1e-5) -> tuple[int, int]:
    """(x - mean) * rstd over one axis, and rstd."""
    count = build.constant(float(build.nodes[x].shape[axis]))
    mean = build("div", build("sum", x, dims=(axis,), keepdim=True), count)
    centred = build("sub", x, mean)
    squares = build("sum", build("square", centred), dims=(axis,), keepdim=True)
    rstd = build("rsqrt", build("add", build("div", squares, count), build.constant(eps)))
    return build("mul", centred, rstd), rstd


def layer_norm(shape: Shape, dtype: str) -> Graph:
    """Layer norm with weight and bias; also returns the rstd for the backward pass."""
    build = Builder()
    x = build("cast", build.input(shape, dtype), dtype="float32")
    weight, bias = build.input(shape[-1:], dtype), build.input(shape[-1:], dtype)
    normed, rstd = _normed(build, x, len(shape) - 1)
    scaled = build("add", build("mul", normed, weight), bias)
    return build.graph(build("cast", scaled, dtype=dtype), rstd)


def double_norm(shape: Shape, dtype: str) -> Graph:
    """Residual, norm, gate (x * sigmoid(x)), norm: two chains of reductions in one kernel."""
    build = Builder()
    one, other = build.input(shape, dtype), build.input(shape, dtype)
    total = build("add", one, other, dtype="float32")
    first, _ = _normed(build, total, len(shape) - 1)
    gated = build("mul", first, build("sigmoid", first))
    second, _ = _normed(build, gated, len(shape) - 1)
    return build.graph(build("cast", second, dtype=dtype), build("cast", total, dtype=dtype))


def masked_softmax(shape: Shape, dtype: str) -> Graph:
    """Softmax of scores (batch, head, query, key) with a bool mask (batch, 1, 1, key)."""
    build = Builder()
    x = build("cast", build.input(shape, dtype), dtype="float32")
    mask = build.input((shape[0], 1, 1, shape[-1]), "bool")
    scores = build("where", mask, x, build.constant(-1e9))
    highest = build("amax", scores, dims=(3,), keepdim=True)
    powers = build("exp", build("sub", scores, highest))
    total = build("sum", powers, dims=(3,), keepdim=True)
    return build.graph(build("cast", build("div", powers, total), dtype=dtype))


def softmax_outer(shape: Shape, dtype: str) -> Graph:
    """Softmax over axis 1 of (batch, channel, position): its columns are not contiguous."""
    build = Builder()
    x = build.input(shape, dtype)
    highest = build("amax", x, dims=(1,), keepdim=True)
    powers = build("exp", build("sub", x, highest))
    return build.graph(build("div", powers, build("sum", powers, dims=(1,), keepdim=True)))


def norm_backward(shape: Shape, dtype: str) -> Graph:
    """Gradients of a layer norm: reductions by row for x, by column for weight and bias."""
    build = Builder()
    dy = build("cast", build.input(shape, dtype), dtype="float32")
    x = build("cast", build.input(shape, dtype), dtype="float32")
    weight = build.input(shape[-1:], dtype)
    last, rows = (len(shape) - 1,), tuple(range(len(shape) - 1))
    normed, rstd = _normed(build, x, last[0])
    scaled = build("mul", dy, weight)
    count = build.constant(float(shape[-1]))
    along = build("div", build("sum", scaled, dims=last, keepdim=True), count)
    with_x = build("sum", build("mul", scaled, normed), dims=last, keepdim=True)
    projected = build("mul", normed, build("div", with_x, count))
    dx = build("mul", rstd, build("sub", build("sub", scaled, along), projected))
    dw = build("sum", build("mul", dy, normed), dims=rows, keepdim=False)
    db = build("sum", dy, dims=rows, keepdim=False)
    return build.graph(*(build("cast", value, dtype=dtype) for value in (dx, dw, db)))


def mean_loss(shape: Shape, dtype: str) -> Graph:
    """The mean over rows of log-sum-exp, and its gradient, the softmax."""
    build = Builder()
    x = build("cast", build.input(shape, dtype), dtype="float32")
    highest = build("amax", x, dims=(1,), keepdim=True)
    powers = build("exp", build("sub", x, highest))
    total = build("sum", powers, dims=(1,), keepdim=True)
    each = build("add", build("log", total), highest)
    rows = build.constant(float(shape[0]))
    loss = build("div", build("sum", each, dims=(0, 1), keepdim=False), rows)
    gradient = build("div", build("div", powers, total), rows)
    return build.graph(loss, build("cast", gradient, dtype=dtype))


def bias_gelu(shape: Shape, dtype: str) -> Graph:
    build = Builder()
    x = build("add", build.input(shape, dtype), build.input(shape[-1:], dtype), dtype="float32")
    inner = build("erf", build("mul", x, build.constant(0.7071067811865476)))
    half = build("mul", x, build.constant(0.5))
    gelu = build("mul", half, build("add", inner, build.constant(1.0)))
    return build.graph(build("cast", gelu, dtype=dtype))


def normed_gelu(shape: Shape, dtype: str) -> Graph:
    """A norm of tanh-GELU, times a part of its derivative: two equal tanh with other readers."""
    build = Builder()
    x = build("cast", build.input(shape, dtype), dtype="float32")
    cubic = build("mul", build("square", x), build("mul", x, build.constant(0.044715)))
    wide = build("mul", build("add", x, cubic), build.constant(0.7978845608028654))
    one = build.constant(1.0)
    half = build("mul", x, build.constant(0.5))
    gelu = build("mul", half, build("add", one, build("tanh", wide)))
    normed, _ = _normed(build, gelu, len(shape) - 1)
    steep = build("sub", one, build("square", build("tanh", wide)))
    return build.graph(build("cast", build("mul", normed, steep), dtype=dtype))


def quantised(shape: Shape, dtype: str) -> Graph:
    """Quantization of each row to int8; also returns the scales."""
    build = Builder()
    x = build.input(shape, dtype)
    highest = build(
        "amax", build("abs", build("cast", x, dtype="float32")), dims=(1,), keepdim=True
    )
    scale = build("div", highest, build.constant(127.0))
    return build.graph(as_int8(build, build("div", x, scale)), scale)


def quantised_norm(shape: Shape, dtype: str, block: int) -> Graph:
    """Residual, norm, quantisation of blocks of a row to int8; also returns sum and scales."""
    build = Builder()
    total = build("add", build.input(shape, dtype), build.input(shape, dtype))
    normed, _ = _normed(build, build("cast", total, dtype="float32"), len(shape) - 1)
    scaled = build("mul", normed, build.input(shape[-1:], dtype))
    blocks = build("view", scaled, shape=(*shape[:-1], shape[-1] // block, block))
    highest = build("amax", build("abs", blocks), dims=(len(shape),), keepdim=True)
    scale = build("div", build("maximum", highest, build.constant(1e-8)), build.constant(127.0))
    narrow = as_int8(build, build("div", blocks, scale))
    return build.graph(total, build("view", narrow, shape=shape), scale)


def head_norms(shape: Shape, dtype: str, heads: int) -> Graph:
    """A norm over each head, the softmax of each head, and a norm over the whole row of both."""
    build = Builder()
    x = build("cast", build.input(shape, dtype), dtype="float32")
    last = len(shape)
    parts = build("view", x, shape=(*shape[:-1], heads, shape[-1] // heads))
    normed, _ = _normed(build, parts, last)
    powers = build("exp", build("sub", parts, build("amax", parts, dims=(last,), keepdim=True)))
    share = build("div", powers, build("sum", powers, dims=(last,), keepdim=True))
    both = build("view", build("add", normed, share), shape=shape)
    whole, _ = _normed(build, both, last - 1)
    return build.graph(build("cast", whole, dtype=dtype))


def quantised_gradient(shape: Shape, dtype: str, block: int) -> Graph:
    """The gradient of a scaled row divided by its blocks' maxima, and that of the scale."""
    build = Builder()
    dy = build("cast", build.input(shape, dtype), dtype="float32")
    weight = build.input(shape[-1:], dtype)
    normed, _ = _normed(build, build("mul", dy, weight), 1)
    blocks = build("view", normed, shape=(shape[0], shape[1] // block, block))
    highest = build("amax", build("abs", blocks), dims=(2,), keepdim=True)
    shares = build("view", build("div", blocks, highest), shape=shape)
    dw = build("sum", build("mul", dy, normed), dims=(0,), keepdim=False)
    return build.graph(build("cast", shares, dtype=dtype), dw)


def cross_entropy(shape: Shape, dtype: str) -> Graph:
    """Cross-entropy of each row (a one-hot sum at the label) and its gradient."""
    build = Builder()
    x, label = build.input(shape, dtype), build.input((shape[0], 1), "int64")
    is_label = build("eq", build("iota", shape=shape[-1:], dtype="int64", start=0, step=1), label)
    highest = build("amax", x, dims=(1,), keepdim=True)
    shifted = build("sub", x, highest)
    total = build("log", build("sum", build("exp", shifted), dims=(1,), keepdim=True))
    loss = build("sub", shifted, total)
    masked = build("where", is_label, loss, build.constant(0.0))
    gradient = build("sub", build("exp", loss), build("cast", is_label, dtype="float32"))
    at_label = build("sum", masked, dims=(1,), keepdim=False)
    return build.graph(at_label, build("cast", gradient, dtype=dtype))


def as_int8(build: Builder, x: int) -> int:
    rounded = build("maximum", build("round", x), build.constant(-127.0))
    return build("cast", build("minimum", rounded, build.constant(127.0)), dtype="int8")


def gated(shape: Shape, dtype: str) -> Graph:
    """silu(a) * relu(b), where a and b are the halves of one tensor."""
    build = Builder()
    x = build.input((*shape[:-1], shape[-1] * 2), dtype)
    last = len(shape) - 1
    a = build("slice", x, shape=shape, dim=last, start=0, step=1)
    b = build("slice", x, shape=shape, dim=last, start=shape[-1], step=1)
    return build.graph(build("mul", build("mul", a, build("sigmoid", a)), build("relu", b)))


def heads(shape: Shape, dtype: str) -> Graph:
    """A norm over each head of (batch, token, heads * width), through a view."""
    build = Builder()
    x = build.input(shape, dtype)
    parts = build("view", x, shape=(*shape[:-1], 4, shape[-1] // 4))
    normed, _ = _normed(build, build("cast", parts, dtype="float32"), 3)
    whole = build("view", normed, shape=shape)
    return build.graph(build("cast", build("add", whole, x), dtype=dtype))


def column_sum(shape: Shape, dtype: str) -> Graph:
    build = Builder()
    x = build("cast", build.input(shape, dtype), dtype="float32")
    return build.graph(build("sum", x, dims=(0,), keepdim=False))


def broadcast_sum(shape: Shape, dtype: str) -> Graph:
    """A reduction over a broadcast axis, and amin and amax."""
    build = Builder()
    x, y = build.input(shape, dtype), build.input((shape[0], 1), dtype)
    wide = build("expand", y, shape=shape)
    total = build("sum", wide, dims=(1,), keepdim=True)
    lowest = build("amin", x, dims=(1,), keepdim=True)
    return build.graph(build("add", total, lowest), build("amax", x, dims=(1,), keepdim=False))


def dropout_residual(shape: Shape, dtype: str) -> Graph:
    """Norm, dropout with the second of two seeds, residual; also returns the mask."""
    build = Builder()
    x, seeds = build.input(shape, dtype), build.input((2,), "int64")
    normed, _ = _normed(build, build("cast", x, dtype="float32"), len(shape) - 1)
    seed = build("slice", seeds, shape=(1,), dim=0, start=1, step=1)
    numbers = build("random", seed, shape=shape, dtype="float32", words=8)
    mask = build("gt", numbers, build.constant(0.25))
    scaled = build("mul", build("mul", mask, normed), build.constant(1 / 0.75))
    return build.graph(build("cast", build("add", scaled, x), dtype=dtype), mask)


def attention(shape: Shape, dtype: str) -> Graph:
    """Masked attention of queries, keys and values (batch, head, position, width)."""
    build = Builder()
    q, k, v = (build.input(shape, dtype) for _ in range(3))
    return build.graph(*_attend(build, q, k, v, dtype))


def projected_attention(shape: Shape, dtype: str) -> Graph:
    """Attention of slices of one projection (batch * position, 3 * head * width)."""
    build = Builder()
    batch, heads, places, width = shape
    x = build.input((batch * places, 3 * heads * width), dtype)
    x = build("view", x, shape=(batch, places, 3, heads, width))
    x = build("permute", x, dims=(2, 0, 3, 1, 4))
    parts = []
    for start in range(3):
        part = build("slice", x, shape=(1, *shape), dim=0, start=start, step=1)
        parts.append(build("copy", build("view", part, shape=shape)))
    output, _ = _attend(build, *parts, dtype)
    output = build("copy", build("permute", output, dims=(0, 2, 1, 3)))
    return build.graph(build("view", output, shape=(batch, places, heads * width)))


def _attend(build: Builder, q: int, k: int, v: int, dtype: str) -> tuple[int, int]:
    """The output of attention and its softmax weights."""
    shape = build.nodes[q].shape
    mask = build.input((shape[0], 1, 1, shape[2]), "bool")
    scores = build("dot", q, build("permute", k, dims=(0, 1, 3, 2)))
    scores = build("mul", scores, build.constant(shape[3] ** -0.5))
    scores = build("where", mask, scores, build.constant(-1e4), dtype=dtype)
    wide = build("cast", scores, dtype="float32")
    powers = build("exp", build("sub", wide, build("amax", wide, dims=(3,), keepdim=True)))
    share = build("div", powers, build("sum", powers, dims=(3,), keepdim=True))
    share = build("cast", share, dtype=dtype)
    return build("dot", share, v), share


def attention_backward(shape: Shape, dtype: str) -> Graph:
    """Gradients of attention with respect to queries, keys and values."""
    build = Builder()
    batch, heads, places, _ = shape
    share = build.input((batch, heads, places, places), dtype)
    q, k, v, gradient = (build.input(shape, dtype) for _ in range(4))
    transposed = (0, 1, 3, 2)
    towards_v = build("dot", build("permute", share, dims=transposed), gradient)
    towards_share = build("dot", gradient, build("permute", v, dims=transposed))
    weighed = build("mul", towards_share, share)
    total = build("sum", weighed, dims=(3,), keepdim=True)
    scores = build("sub", weighed, build("mul", share, total))
    towards_q = build("dot", scores, k)
    towards_k = build("dot", build("permute", scores, dims=transposed), q)
    return build.graph(towards_q, towards_k, towards_v)


def pooling(shape: Shape, dtype: str) -> Graph:
    """Attention pooling with one query for each sequence: the dots have axes of length 1."""
    build = Builder()
    x, query = build.input(shape, dtype), build.input((shape[0], 1, shape[2]), dtype)
    scores = build("dot", query, build("permute", x, dims=(0, 2, 1)))
    powers = build("exp", build("sub", scores, build("amax", scores, dims=(2,), keepdim=True)))
    share = build("div", powers, build("sum", powers, dims=(2,), keepdim=True))
    return build.graph(build("dot", build("cast", share, dtype=dtype), x))


def weighed_history(shape: Shape, dtype: str) -> Graph:
    """Weighted sum over positions of (batch, position, width), by softmax of scores.

    Rows are contiguous, and the rows of one sequence share its weights.
    """
    build = Builder()
    x, scores = build.input(shape, dtype), build.input(shape[:2], dtype)
    wide = build("cast", scores, dtype="float32")
    powers = build("exp", build("sub", wide, build("amax", wide, dims=(1,), keepdim=True)))
    share = build("div", powers, build("sum", powers, dims=(1,), keepdim=True))
    share = build("cast", share, dtype=dtype)
    weighed = build("mul", build("view", share, shape=(*shape[:2], 1)), x)
    return build.graph(build("sum", weighed, dims=(1,), keepdim=False), share)


def disjoint_union(*graphs: Graph) -> Graph:
    """One graph that contains independent graphs."""
    nodes: list[Node] = []
    outputs: list[int] = []
    for graph in graphs:
        first = len(nodes)
        nodes += [
            replace(n, index=first + n.index, inputs=tuple(first + i for i in n.inputs))
            for n in graph
        ]
        outputs += [first + index for index in graph.outputs]
    return Graph(tuple(nodes), tuple(outputs), graphs[0].varying)


def counter_comparisons(rows: int, columns: int, start: int = -4) -> Graph:
    """Comparisons of a 64-bit counter with numbers of each row, minus a counter with step 3.

    The numbers are within and beyond 32 bits. Bit i of the result is set if comparison i holds.
    """
    build = Builder()
    numbers = build.input((rows, 1), "int64")
    value, weight = build.input((rows, columns)), 1.0
    counter = build("iota", shape=(columns,), dtype="int64", start=start, step=1)
    for op in ("eq", "ne", "lt", "le", "gt", "ge"):
        # The lower half of (2**32 + 1) * x is x.
        for scale in (1, 2**32 + 1, 2**32):
            holds = build(op, counter, build("mul", numbers, build.constant(scale, "int64")))
            number = build("where", holds, build.constant(weight), build.constant(0.0))
            value, weight = build("add", value, number), 2 * weight
        holds = build(op, build.constant(3, "int64"), counter)
        number = build("where", holds, build.constant(weight), build.constant(0.0))
        value, weight = build("add", value, number), 2 * weight
    steps = build("iota", shape=(columns,), dtype="int64", start=0, step=3)
    value = build("sub", value, steps)
    return build.graph(value, build("sum", value, dims=(1,), keepdim=False))
