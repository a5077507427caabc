"""Programs with calls that PyTorch traces in a way of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.unit.fusion.user_programs.checks import (
    Program,
    by_backend,
    differences,
    gradients,
    stitch,
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
        bounds = x.clamp_min(0.5), x.clamp_max(0.5), x.clamp_min(y), x.clamp_max(y)
        parts = F.glu(x, 0), *x.unbind(0), *x.split(2, 1), x.sum(), x[:1].squeeze(0).exp()
        scaled = x.addcmul(y, z, value=3), x.addcdiv(y, z.exp(), value=-0.5)
        return *scaled, changed.exp(), *bounds, *(part * 2 for part in parts)

    x, y, z = torch.randn(3, 4, 5)
    compiled = stitch(function, folder)
    yield from differences("result", compiled(x, y, z), function(x, y, z))
    yield from map(str, compiled.unfused)


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


def checkpoints_with_random_numbers(folder: Path) -> Iterator[str]:
    """Higher-order operators, for which traces record no fake value."""

    def checkpointed(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda y: F.dropout(y.exp(), 0.5), x, use_reentrant=False)
        return y * 2

    for compiled in (stitch(checkpointed, folder), by_backend(checkpointed)):
        x = torch.zeros(64, requires_grad=True)
        result = compiled(x)
        (gradient,) = torch.autograd.grad(result.sum(), x)
        yield from differences("gradient", gradient, result)  # exp(0) = 1: both are the mask
        if not 0 < int((result == 4).sum()) < 64:
            yield f"the mask is {result.tolist()}"


PROGRAMS: dict[str, Program] = {
    "attention": attention,
    "operators that inductor computes": operators_that_inductor_computes,
    "weights beside a dynamic batch": weights_beside_a_dynamic_batch,
    "checkpoints with random numbers": checkpoints_with_random_numbers,
}
