"""Compilation of a program in both ways, and its differences from eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import nostall
from nostall.fusion.fuse import StitchedFunction, stitch_function

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


def differences(
    name: str, results: Any, expected: Any, rtol: float = 1e-5, signs: bool = True
) -> Iterator[str]:
    """Descriptions of results that are not those of eager PyTorch; ``signs``: those of 0 count."""
    pairs = zip(tree_leaves(results), tree_leaves(expected), strict=True)
    for at, (result, wanted) in enumerate(pairs):
        if (result.dtype, result.shape) != (wanted.dtype, wanted.shape):
            yield f"{name} {at}: {result.dtype} {result.shape}, not {wanted.dtype} {wanted.shape}"
            continue
        a, b = result.detach().double(), wanted.detach().double()
        is_equal = torch.allclose(a, b, rtol=rtol, atol=1e-6, equal_nan=True)
        zeros = (b == 0) & (a == 0) & signs
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
