"""Graphs of well-known chains, small enough for an interpreter."""

from __future__ import annotations

from collections.abc import Callable
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
    """With weight and bias; gives mean-free statistics for the backward pass too."""
    build = Builder()
    x = build("cast", build.input(shape, dtype), dtype="float32")
    weight, bias = build.input(shape[-1:], dtype), build.input(shape[-1:], dtype)
    normed, rstd = _normed(build, x, len(shape) - 1)
    scaled = build("add", build("mul", normed, weight), bias)
    return build.graph(build("cast", scaled, dtype=dtype), rstd)


def double_norm(shape: Shape, dtype: str) -> Graph:
    """Residual, norm, gelu-like gate, norm: two chains of reductions in one kernel."""
    build = Builder()
    one, other = build.input(shape, dtype), build.input(shape, dtype)
    total = build("add", one, other, dtype="float32")
    first, _ = _normed(build, total, len(shape) - 1)
    gated = build("mul", first, build("sigmoid", first))
    second, _ = _normed(build, gated, len(shape) - 1)
    return build.graph(build("cast", second, dtype=dtype), build("cast", total, dtype=dtype))


def masked_softmax(shape: Shape, dtype: str) -> Graph:
    """Scores of (batch, head, query, key), a bool mask of (batch, 1, 1, key)."""
    build = Builder()
    x = build("cast", build.input(shape, dtype), dtype="float32")
    mask = build.input((shape[0], 1, 1, shape[-1]), "bool")
    scores = build("where", mask, x, build.constant(-1e9))
    highest = build("amax", scores, dims=(3,), keepdim=True)
    powers = build("exp", build("sub", scores, highest))
    total = build("sum", powers, dims=(3,), keepdim=True)
    return build.graph(build("cast", build("div", powers, total), dtype=dtype))


def softmax_outer(shape: Shape, dtype: str) -> Graph:
    """Softmax over axis 1 of (batch, channel, place): its columns are not contiguous."""
    build = Builder()
    x = build.input(shape, dtype)
    highest = build("amax", x, dims=(1,), keepdim=True)
    powers = build("exp", build("sub", x, highest))
    return build.graph(build("div", powers, build("sum", powers, dims=(1,), keepdim=True)))


def norm_backward(shape: Shape, dtype: str) -> Graph:
    """Gradients of a LayerNorm: dx by row, and the weight's and bias's by column."""
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
    """Log-sum-exp by row, its mean over rows, and the softmax as its gradient."""
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
    """A norm of GELU by tanh, times a part of GELU's derivative: two tanh, read in two ways."""
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
    """Each row as int8 and its scale."""
    build = Builder()
    x = build.input(shape, dtype)
    highest = build(
        "amax", build("abs", build("cast", x, dtype="float32")), dims=(1,), keepdim=True
    )
    scale = build("div", highest, build.constant(127.0))
    return build.graph(as_int8(build, build("div", x, scale)), scale)


def picked(shape: Shape, dtype: str) -> Graph:
    """Cross-entropy of each row and its gradient: what stands at the row's label, and 1 less."""
    build = Builder()
    x, label = build.input(shape, dtype), build.input((shape[0], 1), "int64")
    is_label = build("eq", build("iota", shape=shape[-1:], dtype="int64", start=0, step=1), label)
    highest = build("amax", x, dims=(1,), keepdim=True)
    shifted = build("sub", x, highest)
    total = build("log", build("sum", build("exp", shifted), dims=(1,), keepdim=True))
    loss = build("sub", shifted, total)
    mine = build("where", is_label, loss, build.constant(0.0))
    share = build("sub", build("exp", loss), build("cast", is_label, dtype="float32"))
    picked = build("sum", mine, dims=(1,), keepdim=False)
    return build.graph(picked, build("cast", share, dtype=dtype))


def as_int8(build: Builder, x: int) -> int:
    rounded = build("maximum", build("round", x), build.constant(-127.0))
    return build("cast", build("minimum", rounded, build.constant(127.0)), dtype="int8")


def gated(shape: Shape, dtype: str) -> Graph:
    """silu(a) * relu(b), both halves of one tensor."""
    build = Builder()
    x = build.input((*shape[:-1], shape[-1] * 2), dtype)
    last = len(shape) - 1
    a = build("slice", x, shape=shape, dim=last, start=0, step=1)
    b = build("slice", x, shape=shape, dim=last, start=shape[-1], step=1)
    return build.graph(build("mul", build("mul", a, build("sigmoid", a)), build("relu", b)))


def heads(shape: Shape, dtype: str) -> Graph:
    """A norm over each head of (batch, token, heads * width), seen through a view."""
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
    """A reduction over an axis that is only broadcast, and NaN-aware extremes."""
    build = Builder()
    x, y = build.input(shape, dtype), build.input((shape[0], 1), dtype)
    wide = build("expand", y, shape=shape)
    total = build("sum", wide, dims=(1,), keepdim=True)
    lowest = build("amin", x, dims=(1,), keepdim=True)
    return build.graph(build("add", total, lowest), build("amax", x, dims=(1,), keepdim=False))


def dropped(shape: Shape, dtype: str) -> Graph:
    """A norm, dropout with the second of two seeds, a residual; the mask for the backward pass."""
    build = Builder()
    x, seeds = build.input(shape, dtype), build.input((2,), "int64")
    normed, _ = _normed(build, build("cast", x, dtype="float32"), len(shape) - 1)
    seed = build("slice", seeds, shape=(1,), dim=0, start=1, step=1)
    drawn = build("random", seed, shape=shape, dtype="float32", words=8)
    kept = build("gt", drawn, build.constant(0.25))
    scaled = build("mul", build("mul", kept, normed), build.constant(1 / 0.75))
    return build.graph(build("cast", build("add", scaled, x), dtype=dtype), kept)


def attention(shape: Shape, dtype: str) -> Graph:
    """Scores of queries and keys (batch, head, place, width), a mask, softmax, values."""
    build = Builder()
    q, k, v = (build.input(shape, dtype) for _ in range(3))
    return build.graph(*_attended(build, q, k, v, dtype))


def projected_attention(shape: Shape, dtype: str) -> Graph:
    """The same, from one projection (batch * place, 3 * head * width) to (batch, place, ...)."""
    build = Builder()
    batch, heads, places, width = shape
    x = build.input((batch * places, 3 * heads * width), dtype)
    x = build("view", x, shape=(batch, places, 3, heads, width))
    x = build("permute", x, dims=(2, 0, 3, 1, 4))
    parts = []
    for start in range(3):
        part = build("slice", x, shape=(1, *shape), dim=0, start=start, step=1)
        parts.append(build("copy", build("view", part, shape=shape)))
    made, _ = _attended(build, *parts, dtype)
    made = build("copy", build("permute", made, dims=(0, 2, 1, 3)))
    return build.graph(build("view", made, shape=(batch, places, heads * width)))


def _attended(build: Builder, q: int, k: int, v: int, dtype: str) -> tuple[int, int]:
    """What attention gives, and the shares that it has taken."""
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
    """Gradients of queries, keys and values; what is saved lies as the forward pass left it."""
    build = Builder()
    batch, heads, places, _ = shape
    share = build.input((batch, heads, places, places), dtype)
    q, k, v, gradient = (build.input(shape, dtype) for _ in range(4))
    turned = (0, 1, 3, 2)
    towards_v = build("dot", build("permute", share, dims=turned), gradient)
    towards_share = build("dot", gradient, build("permute", v, dims=turned))
    weighed = build("mul", towards_share, share)
    total = build("sum", weighed, dims=(3,), keepdim=True)
    scores = build("sub", weighed, build("mul", share, total))
    towards_q = build("dot", scores, k)
    towards_k = build("dot", build("permute", scores, dims=turned), q)
    return build.graph(towards_q, towards_k, towards_v)


def pooling(shape: Shape, dtype: str) -> Graph:
    """A query for each sequence (batch, place, width) weighs its places: axes of 1 in the dots."""
    build = Builder()
    x, query = build.input(shape, dtype), build.input((shape[0], 1, shape[2]), dtype)
    scores = build("dot", query, build("permute", x, dims=(0, 2, 1)))
    powers = build("exp", build("sub", scores, build("amax", scores, dims=(2,), keepdim=True)))
    share = build("div", powers, build("sum", powers, dims=(2,), keepdim=True))
    return build.graph(build("dot", build("cast", share, dtype=dtype), x))


def weighed_history(shape: Shape, dtype: str) -> Graph:
    """Places of (batch, place, width) weighed by their scores (batch, place) and added up: rows lie
    along memory, and those of one sequence share its weights."""
    build = Builder()
    x, scores = build.input(shape, dtype), build.input(shape[:2], dtype)
    wide = build("cast", scores, dtype="float32")
    powers = build("exp", build("sub", wide, build("amax", wide, dims=(1,), keepdim=True)))
    share = build("div", powers, build("sum", powers, dims=(1,), keepdim=True))
    share = build("cast", share, dtype=dtype)
    weighed = build("mul", build("view", share, shape=(*shape[:2], 1)), x)
    return build.graph(build("sum", weighed, dims=(1,), keepdim=False), share)


def together(*graphs: Graph) -> Graph:
    """Graphs that have nothing to do with each other, as one."""
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


ROWS = 7
"""The prime that stands for the rows of :data:`DYNAMIC`."""


def _varying(graph: Graph) -> Graph:
    return replace(graph, varying=ROWS)


DYNAMIC: dict[str, Callable[[], Graph]] = {
    "layer norm": lambda: _varying(layer_norm((ROWS, 2, 100), "float16")),
    "masked softmax": lambda: _varying(masked_softmax((ROWS, 1, 4, 48), "float16")),
    "softmax of an outer axis": lambda: _varying(softmax_outer((ROWS, 24, 5), "float32")),
    "norm backward": lambda: _varying(norm_backward((ROWS, 3, 80), "float16")),
    "bias and gelu": lambda: _varying(bias_gelu((ROWS, 48), "float16")),
    "gated": lambda: _varying(gated((ROWS, 3, 30), "float16")),
    "heads": lambda: _varying(heads((ROWS, 2, 64), "float16")),
    "dropout": lambda: _varying(dropped((ROWS, 3, 30), "float32")),
    "attention": lambda: _varying(attention((ROWS, 2, 9, 24), "float32")),
    "weighed history": lambda: _varying(weighed_history((ROWS, 6, 32), "float16")),
    "attention pooling": lambda: _varying(pooling((ROWS, 10, 24), "float16")),
}

PACKED: dict[str, Callable[[], Graph]] = {
    "three": lambda: together(
        layer_norm((5, 100), "float16"),
        gated((3, 30), "float16"),
        softmax_outer((2, 24, 5), "float32"),
    ),
    "dynamic": lambda: together(
        _varying(bias_gelu((ROWS, 48), "float16")),
        layer_norm((3, 40), "float32"),
        heads((ROWS, 2, 64), "float16"),
    ),
}


def counted(rows: int, columns: int, start: int = -4) -> Graph:
    """A counter in 64 bits beside numbers of each row, in and beyond 32: which comparisons hold;
    less another one, which counts by 3."""
    build = Builder()
    places = build.input((rows, 1), "int64")
    value, weight = build.input((rows, columns)), 1.0
    counter = build("iota", shape=(columns,), dtype="int64", start=start, step=1)
    for op in ("eq", "ne", "lt", "le", "gt", "ge"):
        # 2**32 + 1 times a number has it in its lower half, too.
        for scale in (1, 2**32 + 1, 2**32):
            told = build(op, counter, build("mul", places, build.constant(scale, "int64")))
            number = build("where", told, build.constant(weight), build.constant(0.0))
            value, weight = build("add", value, number), 2 * weight
        told = build(op, build.constant(3, "int64"), counter)
        number = build("where", told, build.constant(weight), build.constant(0.0))
        value, weight = build("add", value, number), 2 * weight
    steps = build("iota", shape=(columns,), dtype="int64", start=0, step=3)
    value = build("sub", value, steps)
    return build.graph(value, build("sum", value, dims=(1,), keepdim=False))


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
    "picked": lambda: picked((3, 700), "float16"),
    "quantised": lambda: quantised((5, 300), "float16"),
    "gated": lambda: gated((2, 3, 30), "float16"),
    "heads": lambda: heads((2, 1, 64), "float16"),
    "comparisons with a counter": lambda: counted(7, 12),
    "dropout": lambda: dropped((3, 90), "float16"),
    "column sum": lambda: column_sum((530, 12), "float32"),
    "sum of a broadcast": lambda: broadcast_sum((6, 39), "float32"),
    "attention": lambda: attention((2, 3, 10, 24), "float16"),
    "projected attention": lambda: projected_attention((2, 2, 9, 16), "float32"),
    "attention backward": lambda: attention_backward((2, 2, 12, 20), "float32"),
    "attention pooling": lambda: pooling((4, 10, 24), "float16"),
    "weighed history": lambda: weighed_history((3, 10, 64), "float16"),
    "weighed history, odd": lambda: weighed_history((3, 10, 24), "float16"),
}
