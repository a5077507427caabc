"""Programs of users, compiled in Triton's interpreter and compared with eager PyTorch.

``python -m tests.unit.fusion.user_programs FOLDER`` prints the wrong results of each program as
JSON. Each program stands for a kind of fault; a program without wrong results has an empty list.
"""

from __future__ import annotations

import json
import operator
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils._pytree import tree_leaves

import nostall
from nostall.fusion.fuse import StitchedFunction, stitch_function
from nostall.fusion.testing.triton_interpreter import prepare

Function = Callable[..., Any]
Program = Callable[[Path], Iterator[str]]
ALWAYS_STITCHED = {
    "nostall.choose": "stitched",
    "nostall.fuse": "all",
    "nostall.fallback": "eager",
}


def stitch(function: Function, folder: Path) -> StitchedFunction:
    torch._dynamo.reset()
    return stitch_function(function, folder=folder)


def by_backend(function: Function) -> Any:
    """The function by the ``torch.compile`` backend, with all kernels that it can have."""
    torch._dynamo.reset()
    return nostall.fuse(function, options=ALWAYS_STITCHED)


def differences(name: str, results: Any, expected: Any, rtol: float = 1e-5) -> Iterator[str]:
    """Descriptions of results that are not those of eager PyTorch; the sign of 0 counts."""
    pairs = zip(tree_leaves(results), tree_leaves(expected), strict=True)
    for at, (result, wanted) in enumerate(pairs):
        if (result.dtype, result.shape) != (wanted.dtype, wanted.shape):
            yield f"{name} {at}: {result.dtype} {result.shape}, not {wanted.dtype} {wanted.shape}"
            continue
        a, b = result.detach().double(), wanted.detach().double()
        is_equal = torch.allclose(a, b, rtol=rtol, atol=1e-6, equal_nan=True)
        zeros = (b == 0) & (a == 0)
        if not is_equal or not torch.equal(a.signbit() & zeros, b.signbit() & zeros):
            wrong = (~torch.isclose(a, b, rtol, 1e-6, True)).flatten()
            pairs_of_values = zip(
                a.flatten()[wrong].tolist(), b.flatten()[wrong].tolist(), strict=True
            )
            yield f"{name} {at}: (result, expected) {list(pairs_of_values)[:4]}"


def gradients(function: Function, *inputs: Tensor) -> list[Tensor]:
    """The gradients of the sum of a function's result."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    return list(torch.autograd.grad(function(*leaves).sum(), leaves))


def weights_beside_a_dynamic_batch(folder: Path) -> Iterator[str]:
    """Kernels without a tensor of the dynamic size, in a graph that has one."""

    def scaled_weights(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return x @ (w.float() * s).softmax(-1)

    def repeated_rows(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp(), s.expand(x.shape[0], -1).sum(0)

    w, s = torch.arange(-40, 40, dtype=torch.int8).view(8, 10), torch.linspace(0.1, 1, 10)
    for function in (scaled_weights, repeated_rows):
        compiled = by_backend(function)
        for rows in (5, 7, 12):
            x = torch.randn(rows, 8)
            yield from differences(
                f"{function.__name__} of {rows} rows", compiled(x, w, s), function(x, w, s)
            )


def attention(folder: Path) -> Iterator[str]:
    """Operators that PyTorch decomposes for inference only, with their gradients."""
    x = torch.randn(1, 2, 5, 4)
    for is_causal in (False, True):

        def attend(q: Tensor, is_causal: bool = is_causal) -> Tensor:
            y = F.scaled_dot_product_attention(q, q.exp(), q * 2, is_causal=is_causal)
            return y.square()

        yield from differences("value", stitch(attend, folder)(x), attend(x))
        result, expected = (gradients(f, x) for f in (stitch(attend, folder), attend))
        yield from differences("gradient", result, expected, 1e-4)


def operators_that_inductor_computes(folder: Path) -> Iterator[str]:
    """Operators without a decomposition in Inductor's graphs."""

    def function(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        changed = torch.select_scatter(x, z[1], 0, -1)
        return x.addcmul(y, z, value=3), x.addcdiv(y, z.exp(), value=-0.5), changed.exp()

    x, y, z = torch.randn(3, 4, 5)
    compiled = stitch(function, folder)
    yield from differences("result", compiled(x, y, z), function(x, y, z))
    yield from map(str, compiled.unfused)


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


PROGRAMS: dict[str, Program] = {
    "narrow floats that are compared": narrow_floats_that_are_compared,
    "python numbers": python_numbers,
    "several dtypes": several_dtypes,
    "attention": attention,
    "operators that inductor computes": operators_that_inductor_computes,
    "weights beside a dynamic batch": weights_beside_a_dynamic_batch,
}


def run_program(program: Program, folder: Path) -> list[str]:
    torch.manual_seed(0)
    try:
        return list(program(folder))
    except Exception as error:  # one failing program must not hide the others
        return [f"{type(error).__name__}: {str(error)[:500]}"]


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ["NOSTALL_HOME"] = str(folder)
    warnings.simplefilter("ignore")
    prepare()
    names = sys.argv[2:] or PROGRAMS
    print(json.dumps({name: run_program(PROGRAMS[name], folder) for name in names}))


if __name__ == "__main__":
    main()
