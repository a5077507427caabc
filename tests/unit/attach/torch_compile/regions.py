"""Regions that other processes stitch in tests, and for what."""

from __future__ import annotations

from triton.backends.compiler import GPUTarget

from nostall.attach.torch_compile.measure.plan_tuning import Race
from nostall.fusion.graph.builder import Builder
from nostall.fusion.graph.graph import Graph

HOPPER = GPUTarget("cuda", 90, 32)


def normed(rows: int) -> Graph:
    """Rows, each divided by its sum."""
    build = Builder()
    x = build.input((rows, 768))
    return build.graph(build("div", x, build("sum", x, dims=(1,), keepdim=True)))


def race() -> Race:
    return Race(2, 1.0, "reductions")


def bordered() -> Graph:
    """What is no region."""
    build = Builder()
    x = build.input((8, 768))
    return build.graph(build.opaque("a border", x, shape=(8,), dtype="float32"))
