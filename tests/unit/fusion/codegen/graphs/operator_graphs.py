"""Operator graphs for tests of evaluation and exploration: two fixed ones and random ones."""

from __future__ import annotations

from hypothesis import strategies as st

from nostall.fusion import Builder, Graph


def layer_norm(rows: int = 64, columns: int = 768) -> Graph:
    """A layer norm with a residual: two dependent reductions and broadcast weights."""
    build = Builder()
    x, residual = build.input((rows, columns)), build.input((rows, columns))
    weight = build.input((columns,))
    total = build("add", x, residual)
    share = build.constant(1.0 / columns)
    mean = build("mul", build("sum", total, dims=(1,), keepdim=True), share)
    away = build("sub", total, mean)
    spread = build("mul", build("sum", build("square", away), dims=(1,), keepdim=True), share)
    scale = build("rsqrt", build("add", spread, build.constant(1e-5)))
    return build.graph(build("mul", build("mul", away, scale), weight), total)


def norm_gradient(rows: int = 4096, columns: int = 1024) -> Graph:
    """The gradient of a norm: a sum over columns that rows read, and a final sum over rows."""
    build = Builder()
    gradient, x = build.input((rows, columns)), build.input((rows, columns))
    both = build("mul", gradient, x)
    dot = build("sum", both, dims=(1,), keepdim=True)
    back = build("sub", gradient, build("mul", x, dot))
    return build.graph(back, build("sum", both, dims=(0,), keepdim=False))


@st.composite
def operator_graphs(draw: st.DrawFn, most: int = 9) -> Graph:
    """Random graphs of elementwise operators, reductions, broadcasts, views, opaque operators."""
    build = Builder()
    rows, columns = draw(st.sampled_from([(128, 96), (4096, 2048), (1, 64)]))
    full = [build.input((rows, columns)) for _ in range(draw(st.integers(1, 2)))]
    others = [build.input((columns,))]
    for _ in range(draw(st.integers(2, most))):
        one = draw(st.sampled_from(full))
        kind = draw(
            st.sampled_from(["unary", "binary", "broadcast", "row", "column", "turn", "wall"])
        )
        if kind == "unary":
            full.append(build(draw(st.sampled_from(["neg", "exp", "tanh"])), one))
        elif kind == "binary":
            full.append(build("add", one, draw(st.sampled_from(full))))
        elif kind == "broadcast":
            full.append(build("mul", one, draw(st.sampled_from(others))))
        elif kind == "row":
            others.append(build("sum", one, dims=(1,), keepdim=True))
        elif kind == "column":
            others.append(build("amax", one, dims=(0,), keepdim=True))
        elif kind == "turn":
            transposed = build("permute", one, dims=(1, 0))
            full.append(build("copy", build("view", transposed, shape=(rows, columns))))
        else:
            full.append(build.opaque("matmul", one, shape=(rows, columns), dtype="float32"))
    return build.graph(full[-1], others[-1])
