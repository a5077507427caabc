"""Whether a stitched kernel is right: guard bands around its memory, fp64 for its values."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from nostall.fusion.codegen.runtime import eager
from nostall.fusion.codegen.runtime.kernel import StitchedKernel
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph
from nostall.fusion.graph.dynamic_size import resized
from nostall.fusion.graph.graph import Graph, Node
from nostall.fusion.testing.reference import interpret

BAND = 4096
"""Elements before and after every tensor that no kernel may touch."""
TIMES_EAGER = 16
"""How much larger than operator-by-operator execution in fp32 the largest error may be."""
ROUNDING = {"float32": 2e-6, "float16": 2**-10, "bfloat16": 2**-7}


class Stray(AssertionError):
    """A kernel wrote outside of its outputs."""


class Guarded:
    """A kernel whose every tensor lies between bands; inputs are surrounded by NaN."""

    def __init__(self, kernel: StitchedKernel) -> None:
        self.kernel = kernel
        self.program = kernel.program

    def __call__(self, *inputs: Tensor, size: int | None = None) -> tuple[Tensor, ...]:
        graph, varying = self.program.graph, self.program.graph.varying
        device = inputs[0].device if inputs else _DEVICE
        given = []
        for index, value in zip(self.program.inputs, inputs, strict=True):
            buffer, view = banded(graph[index].resized(varying, size), device)
            view.copy_(value)
            given.append((buffer, view, buffer.clone()))
        made = [banded(graph[i].resized(varying, size), device) for i in self.program.outputs]
        spaces = {}
        for space in self.program.workspaces:
            elements = resized(space.elements, varying, size) + 2 * BAND
            dtype = getattr(torch, space.dtype)
            full = torch.full((elements,), _poison(dtype), dtype=dtype, device=device)
            spaces[space.name] = full
        self.kernel.launch(
            [view for _, view, _ in given],
            [view for _, view in made],
            {name: buffer[BAND:-BAND] for name, buffer in spaces.items()},
            size,
        )
        for buffer, _, before in given:
            if not _same(buffer, before):
                raise Stray(f"an input was written by {self.kernel.file}")
        for buffer, view in made:
            _check_around(buffer, view, self.kernel)
        for buffer in spaces.values():
            _check_around(buffer, buffer[BAND:-BAND], self.kernel)
        return tuple(view for _, view in made)


_DEVICE = torch.device("cpu")


def _poison(dtype: torch.dtype) -> float | int | bool:
    return float("nan") if dtype.is_floating_point else dtype == torch.bool or 113


def banded(node: Node, device: torch.device) -> tuple[Tensor, Tensor]:
    """Poisoned memory with bands, and the node's tensor inside of it."""
    dtype = getattr(torch, node.dtype)
    extent = sum((n - 1) * s for n, s in zip(node.shape, node.strides, strict=True)) + 1
    size = extent + 2 * BAND
    buffer = torch.full((size,), _poison(dtype), dtype=dtype, device=device)
    return buffer, buffer.as_strided(node.shape, node.strides, BAND)


def _same(left: Tensor, right: Tensor) -> bool:
    # As bytes: NaN has to stay the NaN it was.
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def _check_around(buffer: Tensor, view: Tensor, kernel: StitchedKernel) -> None:
    inside = torch.zeros(buffer.shape, dtype=torch.bool, device=buffer.device)
    inside.as_strided(view.shape, view.stride(), BAND).fill_(True)
    clean = torch.full_like(buffer, _poison(buffer.dtype))
    if not _same(buffer[~inside], clean[~inside]):
        raise Stray(f"memory beside an output was written by {kernel.file}")


def guarded(stitched: StitchedGraph) -> StitchedGraph:
    """The same with every kernel :class:`Guarded`."""
    steps = tuple(s if isinstance(s, int) else Guarded(s) for s in stitched.steps)
    return replace(stitched, steps=steps)  # type: ignore[arg-type]


def inputs_for(
    graph: Graph, seed: int, device: str = "cpu", *, special: bool = True
) -> list[Tensor]:
    """Random values, with some NaN, Inf and -0.0 where ``special``."""
    random = torch.Generator().manual_seed(seed)
    found = []
    for index in graph.inputs:
        node = graph[index]
        dtype = getattr(torch, node.dtype)
        if node.dtype == "bool":
            value = torch.rand(node.shape, generator=random) < 0.5
        elif "float" in node.dtype:
            value = torch.randn(node.shape, generator=random)
            if special and seed % 3 == 0 and value.numel() > 8:
                flat = value.view(-1)
                places = torch.randint(0, flat.numel(), (3,), generator=random)
                flat[places] = torch.tensor([float("nan"), float("inf"), -0.0])
        else:
            value = torch.randint(-5, 6, node.shape, generator=random)
        # Laid out where it is used: a copy to another device packs what is not dense.
        laid = torch.empty_strided(node.shape, node.strides, dtype=dtype, device=device)
        found.append(laid.copy_(value.to(dtype)))
    return found


def in_memory(stitched: StitchedGraph) -> frozenset[int]:
    """The values that stand in memory between kernels, where they have their dtype's width; so has
    all that PyTorch computes."""
    outputs = ((s,) if isinstance(s, int) else s.program.outputs for s in stitched.steps)
    return frozenset(index for step in outputs for index in step)


def factors(graph: Graph) -> frozenset[int]:
    """What dots read: tensor cores take it in its own dtype, as PyTorch's products do."""
    dots = (node for node in graph if node.kind == "dot")
    return frozenset(graph.base(index) for node in dots for index in node.inputs)


def in_fp32(
    graph: Graph,
    inputs: Sequence[Tensor],
    rounded: Container[int],
    *,
    contracted: bool = False,
) -> list[Tensor]:
    """The graph operator by operator, floats in fp32; only casts and what is ``rounded`` are
    narrower for a moment.  ``contracted``: a product and a sum are rounded once, as one
    instruction does both."""
    wide = [value.float() if value.dtype.is_floating_point else value for value in inputs]
    values: list[Tensor] = []
    given = iter(wide)
    for node in graph:
        kept = replace(node, dtype="float32") if "float" in node.dtype else node
        operands = [values[index] for index in node.inputs]
        if node.op == "input":
            values.append(next(given))
        elif node.kind == "constant":
            values.append(eager.constant_value(kept, _DEVICE))
        elif node.kind == "layout":
            values.append(eager.apply_view(node, operands[0]))
        elif node.op == "cast":
            values.append(operands[0].to(getattr(torch, node.dtype)).to(getattr(torch, kept.dtype)))
        elif contracted and node.op in ("add", "sub") and node.dtype in ROUNDING:
            exact = [_product(graph, values, index, rounded) for index in node.inputs]
            values.append(eager.run_operator(replace(node, dtype="float64"), exact).float())
        else:
            values.append(eager.run_operator(kept, operands))
        if node.index in rounded and "float" in node.dtype:
            values[-1] = values[-1].to(getattr(torch, node.dtype)).float()
    return [values[index] for index in graph.outputs]


def _product(graph: Graph, values: Sequence[Tensor], index: int, rounded: Container[int]) -> Tensor:
    """A value in fp64, before it is rounded to fp32 where it is a product."""
    node = graph[index]
    if node.op != "mul" or node.dtype not in ROUNDING or index in rounded:
        return values[index].double()
    return eager.run_operator(
        replace(node, dtype="float64"), [values[i].double() for i in node.inputs]
    )


def judge(
    stitched: StitchedGraph, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> list[str]:
    """What is wrong with ``outputs``; nothing where they are right.

    Their error against fp64 may be the rounding of their dtype and 16 times the largest error of
    PyTorch's operators in fp32 one by one, with what lies between kernels and what dots read in its
    own dtype.  NaN and Inf stand where fp64 has them, or fp32, with or without contraction (x + 2 c
    may be 0 in one, and not in the other one).
    """
    graph = stitched.graph
    on_cpu = [value.cpu() for value in inputs]
    exact = interpret(graph, [_array(value) for value in on_cpu])
    rounded = in_memory(stitched) | factors(graph)
    single = in_fp32(graph, on_cpu, rounded)
    fused = in_fp32(graph, on_cpu, rounded, contracted=True)
    wrong = []
    references = zip(exact, single, fused, strict=True)
    for index, got, (wide, narrow, once) in zip(graph.outputs, outputs, references, strict=True):
        node = graph[index]
        if tuple(got.shape) != node.shape or got.dtype != getattr(torch, node.dtype):
            wrong.append(f"{node}: got {got.dtype} {tuple(got.shape)}")
        elif got.numel() and (text := _differs(node, got.cpu(), wide, narrow, once)):
            wrong.append(f"{node}: {text}")
    return wrong


def _array(value: Tensor) -> np.ndarray:
    return (value.double() if value.dtype.is_floating_point else value).numpy()


def _differs(
    node: Node, got: Tensor, exact: np.ndarray, single: Tensor, fused: Tensor
) -> str | None:
    if "float" not in node.dtype:
        reference = torch.from_numpy(np.ascontiguousarray(exact)).to(got.dtype)
        count = int((got != reference).sum())
        return f"{count} of {got.numel()} values differ" if count else None
    dtype = getattr(torch, node.dtype)
    want = torch.from_numpy(np.ascontiguousarray(exact)).to(dtype).double()
    eager_value, fused_value = single.to(dtype).double(), fused.to(dtype).double()
    have = got.double()
    finite = want.isfinite() & eager_value.isfinite() & fused_value.isfinite()
    same_as = [_kind(have) == _kind(other) for other in (want, eager_value, fused_value)]
    strange = ~(same_as[0] | same_as[1] | same_as[2])
    if bool(strange.any()):
        at = tuple(int(i) for i in strange.nonzero()[0])
        return f"at {at} got {have[at]}, fp64 gives {want[at]}, fp32 {eager_value[at]}"
    noise = (single.double() - torch.from_numpy(np.ascontiguousarray(exact))).abs()[finite]
    allowed = TIMES_EAGER * (float(noise.max()) if noise.numel() else 0.0) + 1e-7
    error = (have - want).abs()
    bad = finite & (error > allowed + ROUNDING[node.dtype] * want.abs())
    if bool(bad.any()):
        at = tuple(int(i) for i in bad.nonzero()[0])
        return f"at {at} got {have[at]}, fp64 gives {want[at]}, allowed {allowed:.3g} + rounding"
    return None


def _kind(value: Tensor) -> Tensor:
    """0 for finite, 1 for NaN, 2 and 3 for the infinities."""
    kind = value.isnan().to(torch.int8)
    kind[value == float("inf")] = 2
    kind[value == float("-inf")] = 3
    return kind
