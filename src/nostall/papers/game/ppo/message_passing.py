"""Message passing of the graph network along dependences: compiled, with its own gradient.

PyTorch alone would write and read a message per edge and feature several times, which takes most
of the training time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

Float32Array = NDArray[np.float32]
Int32Array = NDArray[np.int32]


@njit(cache=True)  # type: ignore[untyped-decorator]
def _sum_messages(
    nodes: Float32Array,
    edges: Float32Array,
    senders: Int32Array,
    receivers: Int32Array,
    sums: Float32Array,
) -> None:
    """``sums[receiver] += relu(nodes[sender] + edge)`` for each edge."""
    for e in range(len(senders)):
        sender, edge, receiver = nodes[senders[e]], edges[e], sums[receivers[e]]
        for k in range(len(sender)):
            receiver[k] += max(sender[k] + edge[k], np.float32(0))


@njit(cache=True)  # type: ignore[untyped-decorator]
def _sum_gradients(
    nodes: Float32Array,
    edges: Float32Array,
    senders: Int32Array,
    receivers: Int32Array,
    sum_gradients: Float32Array,
    node_gradients: Float32Array,
    edge_gradients: Float32Array,
) -> None:
    """Backward pass of :func:`_sum_messages`."""
    for e in range(len(senders)):
        sender, edge, gradient = nodes[senders[e]], edges[e], sum_gradients[receivers[e]]
        to_node, to_edge = node_gradients[senders[e]], edge_gradients[e]
        for k in range(len(sender)):
            to_edge[k] = gradient[k] if sender[k] + edge[k] > 0 else np.float32(0)
        for k in range(len(sender)):
            to_node[k] += to_edge[k]


class _MessageSum(torch.autograd.Function):  # type: ignore[misc]
    """:func:`_sum_messages` for PyTorch's autograd."""

    @staticmethod
    def forward(
        ctx: Any, nodes: Tensor, edges: Tensor, senders: Int32Array, receivers: Int32Array
    ) -> Tensor:
        ctx.arrays = _to_numpy(nodes), _to_numpy(edges), senders, receivers
        sums = np.zeros_like(ctx.arrays[0])
        _sum_messages(*ctx.arrays, sums)
        return torch.from_numpy(sums)

    @staticmethod
    def backward(ctx: Any, sum_gradients: Tensor) -> tuple[Tensor | None, ...]:
        nodes, edges = ctx.arrays[:2]
        node_gradients, edge_gradients = np.zeros_like(nodes), np.empty_like(edges)
        _sum_gradients(*ctx.arrays, _to_numpy(sum_gradients), node_gradients, edge_gradients)
        return torch.from_numpy(node_gradients), torch.from_numpy(edge_gradients), None, None


def aggregate_messages(
    nodes: Tensor, edges: Tensor, senders: Int32Array, receivers: Int32Array
) -> Tensor:
    """Sum of ``relu(nodes[sender] + edge)`` over the edges of each receiver, [n, width].

    ``nodes`` is [n, width], ``edges`` [E, width]; ``senders`` and ``receivers`` [E] are numbers of
    nodes.
    """
    sums: Tensor = _MessageSum.apply(nodes, edges, senders, receivers)
    return sums


def _to_numpy(tensor: Tensor) -> Float32Array:
    array: Float32Array = tensor.detach().contiguous().numpy()
    return array
