"""Random operator graphs for tests of code generation: a Hypothesis strategy.

Mixed dtypes, broadcasts, reductions over any axes with and without keepdim, views, permutations,
slices, strided inputs, axes of size 1. Discontinuous operators (floor, comparisons, remainders)
only read inputs, whose values are exact: a rounding error of a computed value could change their
result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from nostall.fusion.graph.builder import Builder
from nostall.fusion.graph.dynamic_size import primes_of, varies
from nostall.fusion.graph.graph import Graph, Node
from nostall.fusion.graph.shapes import broadcast_shape, contiguous_strides

SIZES = (1, 2, 3, 4, 5, 8, 16, 17, 40, 100)
MAX_ELEMENTS = 6000
# fmt: off
SMOOTH = (
    "neg", "abs", "relu", "square", "tanh", "sigmoid", "exp", "log", "sqrt", "rsqrt", "reciprocal",
    "sin", "cos", "erf", "expm1", "log1p", "copy",
)
# fmt: on
DISCONTINUOUS = ("sign", "floor", "ceil", "round", "trunc")
PAIRS = ("add", "mul", "sub", "maximum", "minimum", "div")
FLOAT16, BFLOAT16 = "float16", "bfloat16"
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


@dataclass(frozen=True)
class RandomGraph:
    """A graph and the seed of its plans and input values; equal in all processes."""

    graph: Graph
    seed: int

    @property
    def as_bfloat16(self) -> RandomGraph | None:
        """The graph with bfloat16 in place of float16; None if it has no float16."""
        if all(node.dtype != FLOAT16 for node in self.graph):
            return None
        nodes = tuple(_node_as_bfloat16(node) for node in self.graph)
        return replace(self, graph=replace(self.graph, nodes=nodes))


def _node_as_bfloat16(node: Node) -> Node:
    attributes = (
        (name, BFLOAT16 if value == FLOAT16 else value) for name, value in node.attributes
    )
    dtype = BFLOAT16 if node.dtype == FLOAT16 else node.dtype
    return replace(node, dtype=dtype, attributes=tuple(attributes))


@st.composite
def operator_graphs(
    draw: st.DrawFn,
    floats: tuple[str, ...] = ("float32", "float16"),
    max_steps: int = 12,
    varying: int | None = None,
    empty: bool = False,
) -> RandomGraph:
    """Graphs of up to ``max_steps`` steps over inputs of the given float dtypes, int32 and bool.

    ``varying``: the size of the first axis, which is dynamic, or the product of those of the first
    axes. ``empty``: an axis has size 0.
    """
    return _GraphGenerator(draw, floats, varying, empty).generate(max_steps)


class _GraphGenerator:
    def __init__(
        self, draw: st.DrawFn, floats: tuple[str, ...], varying: int | None, empty: bool
    ) -> None:
        self.draw = draw
        self.floats = floats
        self.build = Builder(varying)
        rank = draw(st.integers(1, 4))
        frame = [*primes_of(varying)] if varying else []
        while len(frame) < rank:
            room = MAX_ELEMENTS // math.prod(frame)
            fitting = [s for s in SIZES if s <= room and not varies(s, varying)]
            frame.append(draw(st.sampled_from(fitting)))
        if empty:
            frame[draw(st.integers(0, rank - 1))] = 0
        self.frame = tuple(frame)
        self.values: list[int] = []

    def generate(self, max_steps: int) -> RandomGraph:
        for _ in range(self.draw(st.integers(1, 3))):
            self.values.append(self.input())
        for _ in range(self.draw(st.integers(1, max_steps))):
            value = self.step()
            if value is not None:
                self.values.append(value)
        nodes = self.build.nodes
        read = {index for node in nodes for index in node.inputs}
        ends = [v for v in self.values if v not in read and nodes[v].op != "input"]
        if not ends:
            ends = [self.build("copy", self.values[0])]
        # Some outputs are also read inside the graph.
        others = [v for v in self.values if v in read and nodes[v].op != "input"]
        extra = self.draw(st.lists(st.sampled_from(others), max_size=2)) if others else []
        outputs = list(dict.fromkeys([*ends, *extra]))
        return RandomGraph(self.build.graph(*outputs), self.draw(st.integers(0, 2**16)))

    # -- values ----------------------------------------------------------------------------------

    def input(self, dtype: str | None = None) -> int:
        kept = [size if self.draw(st.integers(0, 4)) else 1 for size in self.frame]
        shape = tuple(kept[self.draw(st.integers(0, len(kept) - 1)) :])
        if self.draw(st.integers(0, 2)):
            shape = self.frame
        strides = contiguous_strides(shape)
        if not self.draw(st.integers(0, 3)):
            # Another order of axes in memory, and gaps between elements.
            order = self.draw(st.permutations(range(len(shape))))
            laid = contiguous_strides(tuple(shape[axis] for axis in order))
            gap = self.draw(st.sampled_from((1, 2)))
            strides = tuple(laid[order.index(axis)] * gap for axis in range(len(shape)))
        chosen = dtype or self.draw(st.sampled_from([*self.floats * 3, "int32", "bool"]))
        return self.build.input(shape, chosen, strides)

    def pick(self, *, floating: bool = False, exact: bool = False) -> int:
        nodes = self.build.nodes
        wanted = [
            v
            for v in self.values
            if (not floating or "float" in nodes[v].dtype) and (not exact or nodes[v].op == "input")
        ]
        if not wanted:
            self.values.append(self.input(self.floats[0]))
            wanted = self.values[-1:]
        return self.draw(st.sampled_from(wanted))

    # -- steps -----------------------------------------------------------------------------------

    def step(self) -> int | None:
        kinds = "smooth smooth pair pair pair reduce reduce view permute slice expand cast"
        kind = self.draw(
            st.sampled_from(f"{kinds} discontinuous choose number iota logic random".split())
        )
        return getattr(self, f"_{kind}")()

    def _smooth(self) -> int:
        return self.build(self.draw(st.sampled_from(SMOOTH)), self.pick(floating=True))

    def _discontinuous(self) -> int:
        value = self.pick(exact=True)
        if self.build.nodes[value].dtype == "bool":
            return self.build("logical_not", value)
        return self.build(self.draw(st.sampled_from(DISCONTINUOUS)), value)

    def _pair(self) -> int | None:
        left, right = self.pick(floating=True), self.pick()
        # PyTorch does not subtract bools.
        arithmetic = PAIRS[:2] if self.build.nodes[right].dtype == "bool" else PAIRS
        return self.fitting(self.draw(st.sampled_from(arithmetic)), left, right)

    def fitting(self, op: str, *operands: int, dtype: str | None = None) -> int | None:
        shape = broadcast_shape([self.build.nodes[v].shape for v in operands])
        if shape is None or math.prod(shape) > MAX_ELEMENTS:
            return None
        return self.build(op, *operands, dtype=dtype)

    def _number(self) -> int | None:
        number = self.draw(st.sampled_from((0.5, -1.5, 2.0, 3.0, 1e-5)))
        value = self.pick(floating=True)
        constant = self.build.constant(number, self.build.nodes[value].dtype)
        if self.draw(st.booleans()):
            return self.build(self.draw(st.sampled_from(PAIRS)), value, constant)
        op = self.draw(st.sampled_from(["pow", "remainder", "fmod"]))
        value = value if op == "pow" else self.pick(floating=True, exact=True)
        if "float" not in self.build.nodes[value].dtype:
            return None
        return self.build(op, value, constant)

    def _reduce(self) -> int | None:
        value = self.pick()
        node = self.build.nodes[value]
        if not node.shape:
            return None
        axes = st.sets(st.integers(0, len(node.shape) - 1), min_size=1)
        dims = tuple(sorted(self.draw(axes)))
        keepdim = self.draw(st.booleans())
        # An empty axis has no maximum.
        is_empty = math.prod(node.shape[dim] for dim in dims) == 0
        if node.dtype == "bool":
            op = self.draw(st.sampled_from(("any", "all")))
        elif node.dtype == "int32":
            op = "sum" if is_empty else self.draw(st.sampled_from(("sum", "amax", "amin")))
            dtype = "int64" if op == "sum" else None
            return self.build(op, value, dims=dims, keepdim=keepdim, dtype=dtype)
        else:
            ops = ("sum", "sum", "prod") if is_empty else ("sum", "sum", "amax", "amin", "prod")
            op = self.draw(st.sampled_from(ops))
        return self.build(op, value, dims=dims, keepdim=keepdim)

    def _view(self) -> int:
        """A view that merges two neighbouring axes or splits one."""
        value = self.pick()
        shape = self.build.nodes[value].shape
        if len(shape) > 1 and self.draw(st.booleans()):
            at = self.draw(st.integers(0, len(shape) - 2))
            new = (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])
        elif shape:
            at = self.draw(st.integers(0, len(shape) - 1))
            inner = [n for n in range(1, shape[at] + 1) if shape[at] % n == 0] or [1, 3]
            part = self.draw(st.sampled_from(inner))
            new = (*shape[:at], shape[at] // part, part, *shape[at + 1 :])
        else:
            new = (1,)
        return self.build("view", value, shape=new)

    def _permute(self) -> int:
        value = self.pick()
        rank = len(self.build.nodes[value].shape)
        return self.build("permute", value, dims=tuple(self.draw(st.permutations(range(rank)))))

    def _slice(self) -> int | None:
        value = self.pick()
        shape = self.build.nodes[value].shape
        if not shape:
            return None
        dim = self.draw(st.integers(0, len(shape) - 1))
        if not shape[dim]:
            return None
        start = self.draw(st.integers(0, shape[dim] - 1))
        step = self.draw(st.sampled_from((1, 1, 2)))
        count = self.draw(st.integers(1, -(-(shape[dim] - start) // step)))
        # Parts of several dynamic axes are captured from their start, and as a whole.
        several = len(primes_of(self.build.varying or 1)) > 1
        if several and any(varies(each, self.build.varying) for each in (shape[dim], count)):
            return None
        new = (*shape[:dim], count, *shape[dim + 1 :])
        return self.build("slice", value, shape=new, dim=dim, start=start, step=step)

    def _expand(self) -> int | None:
        value = self.pick()
        shape = broadcast_shape([self.build.nodes[value].shape, self.frame])
        if shape is None or math.prod(shape) > MAX_ELEMENTS:
            return None
        return self.build("expand", value, shape=shape)

    def _cast(self) -> int:
        value = self.pick()
        return self.build("cast", value, dtype=self.draw(st.sampled_from(self.floats)))

    def _choose(self) -> int | None:
        left, right = self.pick(exact=True), self.pick(exact=True)
        condition = self.fitting(self.draw(st.sampled_from(COMPARISONS)), left, right)
        if condition is None:
            return None
        yes, no = self.pick(floating=True), self.pick(floating=True)
        return self.fitting("where", condition, yes, no, dtype=self.build.nodes[yes].dtype)

    def _iota(self) -> int | None:
        size = self.frame[-1]
        count = self.build("iota", shape=(size,), dtype="int32", start=1, step=2)
        return self.fitting("add", self.pick(floating=True), count)

    def _random(self) -> int:
        seed = self.build.input((1,), "int64")
        dtype = self.draw(st.sampled_from(self.floats))
        words = self.draw(st.sampled_from((4, 8, 1)))
        drawn = self.build("random", seed, shape=self.frame, dtype=dtype, words=words)
        return self._dropped(seed) or drawn if words == 8 else drawn

    def _dropped(self, seed: int) -> int | None:
        """Dropout with random numbers of 16 bits that no other operator reads."""
        drawn = self.build("random", seed, shape=self.frame, dtype="float32", words=8)
        number = self.build.constant(self.draw(st.floats(-0.5, 1.5, width=32)))
        mask = self.build(self.draw(st.sampled_from(("lt", "le", "gt", "ge"))), drawn, number)
        kept = self.fitting("mul", mask, self.pick(floating=True))
        return None if kept is None else self.build("mul", kept, self.build.constant(1.25))

    def _logic(self) -> int | None:
        is_nan = self.build("isnan", self.pick(floating=True))
        is_inf = self.build("isinf", self.pick(floating=True))
        op = self.draw(st.sampled_from(("logical_and", "logical_or", "logical_xor")))
        return self.fitting(op, is_nan, is_inf)
