"""Programs of users, compiled in Triton's interpreter and compared with eager PyTorch.

``python -m tests.unit.fusion.user_programs FOLDER`` prints the wrong results of each program as
JSON. Each program stands for a kind of fault; a program without wrong results has an empty list.
"""

from __future__ import annotations

import json
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
            yield f"{name} {at}: {result.tolist()}, not {wanted.tolist()}"


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


PROGRAMS: dict[str, Program] = {
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
