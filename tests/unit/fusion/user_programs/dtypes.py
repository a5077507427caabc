"""Programs whose results depend on dtypes: comparisons, Python numbers, bits."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tests.unit.fusion.user_programs.checks import (
    Function,
    Program,
    by_backend,
    differences,
    gradients,
    stitch,
)


def narrow_floats_that_are_compared(folder: Path) -> Iterator[str]:
    """Comparisons of values that a kernel computes with more bits than memory holds."""
    x, w = torch.randn(3, 40), torch.randn(40)

    def extreme(x: Tensor, w: Tensor) -> Tensor:
        return (x * w).amax(-1) - (x * w).amin(-1)

    def jumps(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        tiny, large = x * w * 3e-8, x * w.abs() * 1e5
        signs = tiny > 0, tiny.bool(), tiny.any(-1), torch.logical_or(tiny, tiny), tiny.abs() == 0
        nothing_infinite = torch.nan_to_num(large).isfinite()
        return *signs, large.isinf(), nothing_infinite, large.isfinite()

    for dtype in (torch.float16, torch.bfloat16):
        inputs = x.to(dtype), w.to(dtype)
        for compiled in (by_backend(extreme), stitch(extreme, folder)):
            result, expected = gradients(compiled, *inputs), gradients(extreme, *inputs)
            yield from differences(f"gradient in {dtype}", result, expected, 0.02)
        yield from differences(f"jump in {dtype}", stitch(jumps, folder)(*inputs), jumps(*inputs))


def python_numbers(folder: Path) -> Iterator[str]:
    """Binary operators of a tensor and a Python number, for each dtype."""
    values = torch.tensor([0.1, 0.3, 0.9, 2.7, -0.7, -3.0, 100.0, 0.0])
    operators: tuple[Function, ...] = (
        *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
        *(torch.add, torch.sub, operator.mul, operator.mod, torch.fmod, torch.where),
    )
    dtypes = "float32 float16 bfloat16 int64 uint8 bool"
    for dtype in (getattr(torch, name) for name in dtypes.split()):
        x = values.abs().to(dtype) if dtype == torch.uint8 else values.to(dtype)

        not_of_bools = (torch.sub, operator.mod, torch.fmod)
        functions = [f for f in operators if dtype != torch.bool or f not in not_of_bools]

        def apply(x: Tensor, functions: list[Function] = functions) -> list[Tensor]:
            results = []
            for function in functions:
                for number in (0.1, 3):
                    is_where = function is torch.where
                    results.append(function(x != 0, x, number) if is_where else function(x, number))
            return results

        compiled = stitch(apply, folder)
        yield from differences(f"{dtype}", compiled(x), apply(x))
        yield from map(str, compiled.unfused)


def several_dtypes(folder: Path) -> Iterator[str]:
    """Comparisons of tensors of different dtypes, which have a common one."""
    numbers = [0, 1, 3, 127, -128, -56, 200, 255, 2049, 70000]
    dtypes = "uint8 int8 int64 float16 bfloat16"
    every = [torch.tensor(numbers).to(getattr(torch, name)) for name in dtypes.split()]

    def compare(*tensors: Tensor) -> list[Tensor]:
        first, *others = tensors
        results = [f(first, x) for x in others for f in (torch.eq, torch.gt)]
        return [*results, *(torch.where(first > x, first, x) for x in others)]

    for at, first in enumerate(every):
        others = [x.roll(shift) for x in every[at + 1 :] for shift in (0, 3)]
        if others:
            compiled = stitch(compare, folder)
            result, expected = compiled(first, *others), compare(first, *others)
            yield from differences(f"{first.dtype} and others", result, expected)
            yield from map(str, compiled.unfused)


def masks_of_integers(folder: Path) -> Iterator[str]:
    """Bitwise operators of bools and integers, all fused."""

    def masks(a: Tensor, b: Tensor, q: Tensor) -> tuple[Tensor, ...]:
        return (
            *(a & b, a | b, a ^ b, ~a, a & True, False | b, a ^ a),
            q.masked_fill(~(a & b) | (a ^ b), -1e9).softmax(-1),
        )

    def bits(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        shifted = x << 3, x >> 2, 1 << (y & 7), x << y, x >> y, torch.bitwise_right_shift(x, 9)
        return x & y, x | y, x ^ y, ~x, x & 12, 12 | y, x & (x > 3), *shifted

    a, b, q = torch.randn(4, 6) > 0, torch.randn(6) > 0, torch.randn(4, 6)
    compiled = stitch(masks, folder)
    yield from differences("bool", compiled(a, b, q), masks(a, b, q))
    yield from map(str, compiled.unfused)
    for dtype in (torch.int64, torch.int32, torch.int8, torch.uint8):
        x, y = torch.arange(-40, 60).to(dtype), torch.arange(-3, 97).to(dtype)
        compiled = stitch(bits, folder)
        yield from differences(f"{dtype}", compiled(x, y), bits(x, y))
        yield from map(str, compiled.unfused)


PROGRAMS: dict[str, Program] = {
    "narrow floats that are compared": narrow_floats_that_are_compared,
    "python numbers": python_numbers,
    "several dtypes": several_dtypes,
    "masks of integers": masks_of_integers,
}
