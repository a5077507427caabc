"""Programs whose tensors share memory, have no axes, or hold the negative."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tests.unit.fusion.user_programs.checks import (
    Program,
    by_backend,
    differences,
    stitch,
)


def results_in_shared_memory(folder: Path) -> Iterator[str]:
    """Results of which PyTorch gives each its own memory, changed in place after the call."""
    half = torch.tensor([0.5, 0.5])

    def function(x: Tensor) -> tuple[Tensor, ...]:
        constants = torch.tensor([0.5, 0.5]), torch.tensor(2.0)
        same = x**1, x.clone(), x.to(x.dtype, copy=True), x.sum(()), x + 0, half.clone()
        return x + 1, x + 1, *constants, *same, (x + 1).view(2, 1), x.mul(1.0)

    def view_and_value(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.exp()
        return y, y.view(2, 1)

    def changed_constant(x: Tensor) -> Tensor:
        y = torch.tensor([1.0, 2.0])
        y.add_(x)
        return y.exp()

    for compiled in (stitch(function, folder), by_backend(function)):
        for place in range(len(function(torch.zeros(2)))):
            x = torch.zeros(2)
            results = compiled(x)
            results[place].add_(100)
            others = [y for at, y in enumerate(results) if at != place]
            expected = [y for at, y in enumerate(function(torch.zeros(2))) if at != place]
            yield from differences(f"result {place} changed, other", others, expected)
            yield from differences("input", x, torch.zeros(2))
            yield from differences("next call", compiled(x), function(x))
    y, view = stitch(view_and_value, folder)(torch.zeros(2))
    y.zero_()
    yield from differences("view", view, torch.zeros(2, 1))
    compiled = stitch(changed_constant, folder)
    for _ in range(2):
        x = torch.zeros(2)
        yield from differences("constant changed by the function", compiled(x), changed_constant(x))


def scalars(folder: Path) -> Iterator[str]:
    """Calls that name an axis of a tensor that has none."""

    def reductions(s: Tensor) -> list[Tensor]:
        named = s.sum(0), s.mean(-1), s.amax(0), s.amin(0), s.prod(0), s.any(0), s.all(-1)
        spread = s.var(0, correction=0), s.std(0, correction=0), *torch.var_mean(s, 0, correction=0)
        normalised = s.softmax(0), s.log_softmax(-1), s.logsumexp(0), s.cumsum(0), s.norm(dim=0)
        views = s.transpose(0, 0), s.squeeze(0), s.unsqueeze(0), s.flatten(), s.expand(2, 3)
        picked = s.gather(0, torch.tensor(0)), s.sort(0).values, s.flip(0), s.argmax(0)
        return [(x * 1).clone() for x in (*named, *spread, *normalised, *views, *picked)]

    for dtype in (torch.float32, torch.float16):
        s = torch.tensor(2.5, dtype=dtype)
        yield from differences(f"{dtype}", stitch(reductions, folder)(s), reductions(s), 1e-3)


def negative_and_conjugate_bits(folder: Path) -> Iterator[str]:
    """Inputs and intermediate values whose memory holds the negative or the conjugate."""

    def function(x: Tensor) -> Tensor:
        return x.exp() * 2

    def of_complex(z: Tensor) -> tuple[Tensor, ...]:
        c = z.conj()
        return c.imag * 2, torch.view_as_real(c.resolve_conj()).sum(-1), c.real.exp(), c * 1

    x, z = torch.randn(2, 3), torch.randn(2, 3, dtype=torch.complex64)
    for negative in (torch._neg_view(x), z.conj().imag, torch._neg_view(x).t()):
        for compiled in (stitch(function, folder), by_backend(function)):
            yield from differences("negative", compiled(negative), function(negative))
    for complex_ in (z, z.conj()):
        results, expected = stitch(of_complex, folder)(complex_), of_complex(complex_)
        results, expected = (
            [torch.view_as_real(x) if x.is_complex() else x for x in y] for y in (results, expected)
        )
        yield from differences("complex", results, expected)
    compiled = stitch(function, folder)
    for value in (x, torch._neg_view(x), x):
        yield from differences("changing", compiled(value), function(value))


def parts_of_views(folder: Path) -> Iterator[str]:
    """Halves of values that are computed from a view of a product or of an input.

    The view is an input of its region.
    """

    def rotated(x: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        heads = (x @ w).view(6, 2, 8)
        normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-6) * scale
        first, second = normed.chunk(2, -1)
        return torch.cat((-second, first), -1) + normed, normed.sum(-1)

    def of_an_input(x: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        first, second = (heads := x.view(6, 2, 8) * scale).chunk(2, -1)
        return (first.sigmoid() * second).view(6, 8) @ w[:8], heads.sum(-1), x.exp()

    x, w, scale = torch.randn(6, 16), torch.randn(16, 16), torch.randn(8)
    for function in (rotated, of_an_input):
        for compile_ in (lambda f: stitch(f, folder), by_backend):
            compiled = compile_(function)
            for argument in (x, 2 * x):
                results, expected = (f(argument, w, scale) for f in (compiled, function))
                yield from differences(function.__name__, results, expected)


PROGRAMS: dict[str, Program] = {
    "parts of views": parts_of_views,
    "results in shared memory": results_in_shared_memory,
    "scalars": scalars,
    "negative and conjugate bits": negative_and_conjugate_bits,
}
