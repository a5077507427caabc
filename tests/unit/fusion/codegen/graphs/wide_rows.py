"""Graphs with rows too wide for registers: two fixed ones, and random ones from a seed."""

from __future__ import annotations

import functools
import random

from nostall.fusion.graph.builder import Builder
from nostall.fusion.graph.graph import Graph

FLOATS = ("float32", "float16")
SMOOTH = ("neg", "abs", "relu", "square", "tanh", "sigmoid", "exp", "sin", "erf", "log1p", "copy")
STEPS = ("smooth", "smooth", "pair", "pair", "weight", "column", "cast", "mask", "count")
PAIRS = ("add", "sub", "mul", "maximum", "minimum", "div")


def softmax_norm(shape: tuple[int, int], dtype: str) -> Graph:
    """Softmax, weights and a norm: a sequence of values that each depend on the previous one."""
    build = Builder()
    x, weights = build.input(shape, dtype), build.input(shape[-1:], dtype)
    powers = build("exp", build("sub", x, _reduced(build, "amax", x)))
    weighted = build("mul", build("div", powers, _reduced(build, "sum", powers)), weights)
    count = build.constant(float(shape[-1]))
    centred = build("sub", weighted, build("div", _reduced(build, "sum", weighted), count))
    square = build("div", _reduced(build, "sum", build("square", centred)), count)
    return build.graph(build("mul", centred, build("rsqrt", square), dtype=dtype))


def late_input(shape: tuple[int, int], dtype: str) -> Graph:
    """A tensor scaled by the logsumexp of another tensor. It is first read when the other tensor
    is dead, and no computed value is live between both."""
    build = Builder()
    x, y = build.input(shape, dtype), build.input(shape, dtype)
    highest = _reduced(build, "amax", x)
    powers = build("exp", build("sub", x, highest))
    loss = build("add", build("log", _reduced(build, "sum", powers)), highest)
    largest = _reduced(build, "amax", build("abs", build("mul", y, loss)))
    return build.graph(loss, build("div", build("mul", y, loss), largest, dtype=dtype))


def _reduced(build: Builder, op: str, value: int) -> int:
    return build(op, value, dims=(1,), keepdim=True)


def wide_rows(
    seed: int,
    columns: int,
    floats: tuple[str, ...] = FLOATS,
    others: tuple[str, ...] = ("int32",),
    most_rows: int = 5,
    pairs: tuple[str, ...] = PAIRS,
) -> Graph:
    """Several levels of reductions over the last axis, and operators between them that read inputs
    and earlier values again. Equal seeds give equal graphs.

    Inputs have the dtypes ``floats``, ``others`` (which are cast) and bool. Some are shared by all
    rows, some have one value for each row, some have gaps in memory. ``pairs``: binary operators.
    """
    draw = random.Random(seed)
    shape = draw.randint(1, most_rows), columns
    return _GraphGenerator(draw, shape, floats, others, pairs).generate()


def with_column_sums(graph: Graph, draw: random.Random) -> Graph:
    """The graph with additional sums over rows of one or two values, as in weight gradients."""
    build = Builder()
    build.nodes.extend(graph.nodes)
    shape = max((graph[index].shape for index in graph.operators), key=len)
    wide = [
        index
        for index in graph.operators
        if graph[index].shape == shape and graph[index].dtype == "float32"
    ]
    chosen = draw.sample(wide, min(len(wide), draw.randint(1, 2)))
    sums = [build("sum", index, dims=(0,), keepdim=False) for index in chosen]
    return build.graph(*graph.outputs, *sums)


class _GraphGenerator:
    def __init__(
        self,
        draw: random.Random,
        shape: tuple[int, int],
        floats: tuple[str, ...],
        others: tuple[str, ...],
        pairs: tuple[str, ...],
    ) -> None:
        self.draw = draw
        self.pairs = pairs
        self.floats = floats
        self.others = others
        self.build = Builder()
        self.shape = shape
        self.wide: list[int] = []
        self.narrow: list[int] = []

    def generate(self) -> Graph:
        draw, build = self.draw, self.build
        self.wide += [self.input() for _ in range(draw.randint(1, 3))]
        # The sum of all inputs makes all operators share the columns.
        self.wide.append(functools.reduce(lambda a, b: build("add", a, b), self.wide))
        ends: list[int] = []
        for _ in range(draw.randint(1, 4)):
            for _ in range(draw.randint(1, 4)):
                self.wide.append(self.step())
            reduced = self.reduction()
            self.narrow.append(reduced)
            self.wide.append(build(draw.choice(("sub", "mul", "add")), self.pick(), reduced))
            if not draw.randint(0, 3):
                ends.append(draw.choice([self.wide[-1], reduced]))
        ends.append(build("cast", self.wide[-1], dtype=draw.choice(self.floats)))
        read = {index for node in build.nodes for index in node.inputs}
        ends += [v for v in (*self.wide, *self.narrow) if v not in read and v not in ends]
        return build.graph(*dict.fromkeys(ends))

    def input(self) -> int:
        """An input with rows and columns, cast to a float if necessary."""
        dtype = self.draw.choice((*self.floats * 2, *self.others))
        gap = self.draw.choice((1, 1, 1, 2))
        strides = (self.shape[1] * gap + self.draw.choice((0, 0, 3)), gap)
        value = self.build.input(self.shape, dtype, strides)
        return value if dtype in self.floats else self.build("cast", value, dtype="float32")

    def pick(self) -> int:
        """A value, often a recent one, so that graphs become deep."""
        return self.draw.choice(self.wide[-3:] if self.draw.randint(0, 1) else self.wide)

    def step(self) -> int:
        draw, build = self.draw, self.build
        kind = draw.choice(STEPS)
        value = self.pick()
        if kind == "smooth":
            return build(draw.choice(SMOOTH), value)
        if kind == "pair":
            return build(draw.choice(self.pairs), value, self.pick())
        if kind == "weight":
            return build("mul", value, build.input(self.shape[1:], draw.choice(self.floats)))
        if kind == "column":
            row_values = [*self.narrow, build.input((self.shape[0], 1), draw.choice(self.floats))]
            return build("add", value, draw.choice(row_values))
        if kind == "cast":
            return build("cast", value, dtype=draw.choice(self.floats))
        if kind == "mask":
            mask = build.input(self.shape, "bool")
            return build("where", mask, value, build.constant(draw.choice((0.0, -1.5))))
        numbers = build("iota", shape=self.shape[1:], dtype="int32", start=1, step=2)
        return build("add", value, build("mul", numbers, build.constant(1e-3), dtype="float32"))

    def reduction(self) -> int:
        draw, build = self.draw, self.build
        op = draw.choice(("sum", "sum", "amax", "amin", "any"))
        if op != "any":
            return build(op, self.pick(), dims=(1,), keepdim=True)
        has_nan = build("any", build("isnan", self.pick()), dims=(1,), keepdim=True)
        return build("cast", has_nan, dtype="float32")
