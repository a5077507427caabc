"""What instructions hear from each other along dependences: compiled, with its own gradient.

PyTorch alone would write out and read back a message per dependence and feature several times, and
that takes most of the time that learning takes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


@njit(cache=True)  # type: ignore[untyped-decorator]
def _sums(said: Floats, room: Floats, here: Ints, there: Ints, sums: Floats) -> None:
    """``sums[there] += relu(said[here] + room)`` for each dependence."""
    for e in range(len(here)):
        speaker, passage, hearer = said[here[e]], room[e], sums[there[e]]
        for k in range(len(speaker)):
            hearer[k] += max(speaker[k] + passage[k], np.float32(0))


@njit(cache=True)  # type: ignore[untyped-decorator]
def _gradients(
    said: Floats,
    room: Floats,
    here: Ints,
    there: Ints,
    given: Floats,
    to_said: Floats,
    to_room: Floats,
) -> None:
    """The gradients of :func:`_sums` from ``given``, that of ``sums``."""
    for e in range(len(here)):
        speaker, passage, hearer = said[here[e]], room[e], given[there[e]]
        back, through = to_said[here[e]], to_room[e]
        for k in range(len(speaker)):
            through[k] = hearer[k] if speaker[k] + passage[k] > 0 else np.float32(0)
        for k in range(len(speaker)):
            back[k] += through[k]


class _Messages(torch.autograd.Function):  # type: ignore[misc]
    """:func:`_sums` for PyTorch."""

    @staticmethod
    def forward(ctx: Any, said: Tensor, room: Tensor, here: Ints, there: Ints) -> Tensor:
        ctx.arrays = _plain(said), _plain(room), here, there
        sums = np.zeros_like(ctx.arrays[0])
        _sums(*ctx.arrays, sums)
        return torch.from_numpy(sums)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor | None, ...]:
        said, room = ctx.arrays[:2]
        to_said, to_room = np.zeros_like(said), np.empty_like(room)
        _gradients(*ctx.arrays, _plain(given), to_said, to_room)
        return torch.from_numpy(to_said), torch.from_numpy(to_room), None, None


def heard(said: Tensor, room: Tensor, here: Ints, there: Ints) -> Tensor:
    """[n, width]: ``relu(said[here] + room)`` added up over the dependences of each ``there``.

    ``said`` [n, width] belongs to instructions, ``room`` [E, width] to dependences.
    """
    sums: Tensor = _Messages.apply(said, room, here, there)
    return sums


def _plain(tensor: Tensor) -> Floats:
    array: Floats = tensor.detach().contiguous().numpy()
    return array
