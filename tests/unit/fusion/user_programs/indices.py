"""Programs that index rows, and operators that become several of nostall's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tests.unit.fusion.user_programs.checks import (
    Program,
    by_backend,
    differences,
    stitch,
)


def gathered_values(folder: Path) -> Iterator[str]:
    """Gathers of one element a row, which keep its bits."""
    special = torch.tensor([[-0.0, 1.0, 5.0], [float("-inf"), float("nan"), 2.0], [3.0, 0.0, -7.0]])
    index = torch.tensor([[0], [1], [2]])

    def gather(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        return x.gather(1, index), x.gather(0, index.t()), x.gather(1, index * 0)

    for dtype in (torch.float32, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool):
        x = special.nan_to_num(0.0, 3.0, -3.0) if not dtype.is_floating_point else special
        x = (x.abs() if dtype == torch.uint8 else x).to(dtype)
        compiled = stitch(gather, folder)
        yield from differences(f"{dtype}", compiled(x, index), gather(x, index))
        yield from map(str, compiled.unfused)


def indices_out_of_range(folder: Path) -> Iterator[str]:
    """Labels and indices that PyTorch refuses."""

    def loss(x: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(x, t)

    def gather(x: Tensor, t: Tensor) -> Tensor:
        return x.exp().gather(1, t[:, None])

    def scatter(x: Tensor, t: Tensor) -> Tensor:
        return x.exp().scatter(1, t[:, None], 1.0)

    def embedding(x: Tensor, t: Tensor) -> Tensor:
        return F.embedding(t, x).exp()

    x = torch.randn(3, 5)
    for function in (loss, gather, scatter, embedding):
        for compiled in (stitch(function, folder), by_backend(function)):
            right = torch.tensor([0, 2, 1])
            yield from differences(function.__name__, compiled(x, right), function(x, right))
            for wrong in (torch.tensor([0, 5, 1]), torch.tensor([0, -1, 1])):
                try:
                    compiled(x, wrong)
                except Exception:
                    continue
                yield f"{function.__name__} takes {wrong.tolist()}"
    ignored = torch.tensor([-100, 2, 4])
    yield from differences("ignored", stitch(loss, folder)(x, ignored), loss(x, ignored))


def more_operators(folder: Path) -> Iterator[str]:
    """Operators that become several of nostall's, all fused."""

    def composed(x: Tensor, y: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        a, b = x.chunk(2, -1)
        column = y[:, :1].contiguous()
        return (
            *(torch.cat((-b, a), -1), torch.cat((x, y, x)), torch.stack((x, y), 1)),
            *(
                x.repeat(2, 1),
                x.repeat(3, 1, 2),
                torch.linalg.vector_norm(x, dim=-1),
            ),
            *(x.argmax(-1), x.argmin(0), *x.max(-1), *x.min(0, keepdim=True), x.max(), x.prod()),
            *(x.div(y, rounding_mode="floor"), x.div(y, rounding_mode="trunc"), x // 0.3),
            *(torch.fmax(x, y), torch.fmin(x, y), x.scatter(1, i, column)),
            *(x.scatter_add(1, i, column), x.sinh() + y.cosh(), x.atan2(y)),
        )

    x, y = torch.randn(2, 4, 6)
    i = torch.tensor([[0], [5], [2], [2]])
    special = torch.tensor([[float("nan"), 1.0, 2.0, float("nan"), 0.0, -0.0]]).repeat(4, 1)
    compiled = stitch(composed, folder)
    for left, right in ((x, y), (x, special), (special, y), (x.round(), y.round())):
        yield from differences("", compiled(left, right, i), composed(left, right, i), 1e-4, False)
    yield from map(str, compiled.unfused)


def one_position_beside_products(folder: Path) -> Iterator[str]:
    """One number of a sequence beside small products: the place of a token in a cache."""

    def scores(q: Tensor, k: Tensor) -> Tensor:
        at = torch.arange(20)[5:6]
        return (torch.bmm(q, k) + at * 0.1).softmax(-1)

    q, k = torch.randn(3, 4, 5), torch.randn(3, 5, 6)
    compiled = stitch(scores, folder)
    yield from differences("", compiled(q, k), scores(q, k))
    yield from map(str, compiled.unfused)


PROGRAMS: dict[str, Program] = {
    "one position beside products": one_position_beside_products,
    "gathered values": gathered_values,
    "indices out of range": indices_out_of_range,
    "more operators": more_operators,
}
