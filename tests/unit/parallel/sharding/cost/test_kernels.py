"""Operators that share a kernel, and what of their tensors goes through memory."""

from __future__ import annotations

from dataclasses import replace

from nostall.parallel.sharding.cost.kernels import kernel_shares
from nostall.parallel.sharding.graph import Operator, ShardingGraph, TensorInfo

WHOLE = TensorInfo((8, 8), "float32", 4)
SMALL = TensorInfo((8, 1), "float32", 4)


def _graph(*operators: Operator, small: frozenset[int] = frozenset()) -> ShardingGraph:
    count = 1 + max(t for o in operators for t in o.outputs)
    tensors = tuple(SMALL if t in small else WHOLE for t in range(count))
    return ShardingGraph("graph", (2,), tensors, operators)


def _operator(name: str, inputs: tuple[int, ...], output: int, *, fuses: bool = True) -> Operator:
    return Operator(name, "operation", name, inputs, (output,), ((),), may_fuse=fuses)


X = Operator("x", "input", "x", (), (0,), ((),), moves_memory=False)


def test_what_one_kernel_computes_and_reads_stays_inside() -> None:
    """A product, a norm of its result with a residual, and another product."""
    graph = _graph(
        X,
        _operator("mm", (0,), 1, fuses=False),
        _operator("add", (1, 0), 2),
        _operator("mean", (2,), 3),
        _operator("mul", (2, 3), 4),
        _operator("mm_1", (4,), 5, fuses=False),
        _operator("add_1", (5, 2), 6),
        small=frozenset({3}),
    )
    _, mm, add, mean, mul, mm_1, add_1 = kernel_shares(graph)
    assert (mm.reads, mm.writes, mm.starts) == ({0}, {0}, True)
    assert (add.reads, add.writes, add.starts) == ({0, 1}, {0}, True)  # add_1 reads it later
    assert (mean.reads, mean.writes, mean.starts) == (set(), set(), False)
    assert (mul.reads, mul.writes, mul.starts) == (set(), {0}, False)
    assert (mm_1.reads, mm_1.starts) == ({0}, True)
    assert (add_1.reads, add_1.starts) == ({0, 1}, True)


def test_readers_of_one_tensor_read_it_once() -> None:
    _, sin, cos = kernel_shares(_graph(X, _operator("sin", (0,), 1), _operator("cos", (0,), 2)))
    assert (sin.reads, sin.starts, cos.reads, cos.starts) == ({0}, True, set(), False)


def test_a_kernel_is_of_one_pass_and_one_size() -> None:
    first = _operator("sin", (0,), 1)
    backward = replace(_operator("cos", (1,), 2), is_forward=False)
    _, sin, cos = kernel_shares(_graph(X, first, backward))
    assert (sin.writes, cos.reads, cos.starts) == ({0}, {0}, True)
    view = Operator("view", "operation", "view", (1,), (2,), ((),), moves_memory=False)
    _, sin, _, cos = kernel_shares(_graph(X, first, view, _operator("cos", (2,), 3)))
    assert (sin.writes, cos.reads, cos.starts) == (set(), set(), False)  # through a view
