"""Policy of the ``ppo`` strategy: a graph network over dependences, and its file format.

Node features travel along dependences, forwards and backwards, for a few rounds of message
passing. Then each candidate instruction scores its own actions. The weights do not depend on the
size of a kernel, so a policy that was trained on some kernels can be tried on others.

Message passing of the graph network along dependences: compiled, with its own gradient.

PyTorch alone would write and read a message per edge and feature several times, which takes most
of the training time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from nostall.core import BadInput
from nostall.core.files.atomic import write_atomically
from nostall.core.validation import parse_json
from nostall.papers.game.edits import VARIANTS
from nostall.papers.game.graph_view import EDGE_FEATURES, NODE_FEATURES

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


VERSION = 2
"""Version of the file format. In version 2 each instruction that may move is a candidate."""
_HEADER = "nostall.policy"

_FILE_NAMES = {
    "node_encoder": "enter",
    "edge_encoder": "room",
    "forward_layers": "along",
    "backward_layers": "against",
    "update_layers": "join",
    "action_head": "score",
    "value_head": "worth",
}
"""Module of the network -> its name in policy files and training checkpoints."""


@dataclass(frozen=True, slots=True)
class GraphObservation:
    """One state as the policy observes it."""

    nodes: NDArray[np.float32]
    """[n, features]"""
    edges: NDArray[np.int32]
    """[E, 2]: original indices (earlier, later)."""
    edge_values: NDArray[np.float32]
    """[E, features]"""
    candidates: NDArray[np.int32]
    """[c]: original indices of the instructions that have actions."""
    mask: NDArray[np.bool_]
    """[c * variants]: legal actions."""


class GraphPolicy(nn.Module):  # type: ignore[misc]
    """Actor and critic: scores of all actions and state values, for a batch of states."""

    def __init__(self, width: int = 32, rounds: int = 3) -> None:
        super().__init__()
        self.width, self.rounds = width, rounds
        self.node_encoder = nn.Linear(len(NODE_FEATURES), width)
        self.edge_encoder = nn.Linear(len(EDGE_FEATURES), width)
        self.forward_layers = nn.ModuleList(nn.Linear(width, width) for _ in range(rounds))
        self.backward_layers = nn.ModuleList(nn.Linear(width, width) for _ in range(rounds))
        self.update_layers = nn.ModuleList(nn.Linear(3 * width, width) for _ in range(rounds))
        self.action_head = nn.Sequential(
            nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, len(VARIANTS))
        )
        self.value_head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        nn.init.normal_(self.action_head[-1].weight, std=0.01)
        nn.init.zeros_(self.action_head[-1].bias)

    def forward(self, observations: Sequence[GraphObservation]) -> tuple[Tensor, Tensor, Tensor]:
        """Score all actions of all states.

        Returns the log-probabilities of the actions (-inf: illegal), the number of the state that
        each action belongs to, and the value of each state.
        """
        sizes = np.array([len(o.nodes) for o in observations])
        offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        hidden = self._embed(observations, offsets)
        count = len(observations)
        node_state = torch.from_numpy(np.repeat(np.arange(count), sizes))
        sums = hidden.new_zeros((count, self.width)).index_add(0, node_state, hidden)
        means = sums / torch.from_numpy(sizes.astype(np.float32))[:, None]
        candidates = torch.from_numpy(
            np.concatenate([o.candidates + k for o, k in zip(observations, offsets, strict=True)])
        ).long()
        candidate_state = node_state[candidates]
        inputs = torch.cat([hidden[candidates], means[candidate_state]], dim=1)
        scores = self.action_head(inputs).reshape(-1)
        mask = torch.from_numpy(np.concatenate([o.mask for o in observations]))
        action_state = candidate_state.repeat_interleave(len(VARIANTS))
        log_probabilities = _masked_log_softmax(scores, mask, action_state, count)
        return log_probabilities, action_state, self.value_head(means)[:, 0]

    def _embed(
        self, observations: Sequence[GraphObservation], offsets: NDArray[np.int64]
    ) -> Tensor:
        """Embeddings of all nodes of a batch after message passing, [nodes, width]."""
        nodes = torch.from_numpy(np.concatenate([o.nodes for o in observations]))
        edges = np.concatenate([o.edges + k for o, k in zip(observations, offsets, strict=True)])
        values = torch.from_numpy(np.concatenate([o.edge_values for o in observations]))
        edge_hidden = self.edge_encoder(values)
        hidden: Tensor = torch.relu(self.node_encoder(nodes))
        earlier, later = np.ascontiguousarray(edges.T, dtype=np.int32)
        directions = [
            (senders, receivers, _inverse_degrees(receivers, len(nodes)))
            for senders, receivers in ((earlier, later), (later, earlier))
        ]
        for forward, backward, update in zip(
            self.forward_layers, self.backward_layers, self.update_layers, strict=True
        ):
            parts = [hidden]
            for layer, (senders, receivers, weight) in zip(
                (forward, backward), directions, strict=True
            ):
                sums = aggregate_messages(layer(hidden), edge_hidden, senders, receivers)
                parts.append(sums * weight)
            hidden = hidden + torch.relu(update(torch.cat(parts, dim=1)))
        return hidden


def _inverse_degrees(receivers: NDArray[np.int32], nodes: int) -> Tensor:
    """1 / number of edges that end at each node, [nodes, 1]."""
    counts = np.maximum(1, np.bincount(receivers, minlength=nodes)).astype(np.float32)
    return torch.from_numpy(1 / counts)[:, None]


def _masked_log_softmax(scores: Tensor, mask: Tensor, action_state: Tensor, states: int) -> Tensor:
    """Log-probabilities among the legal actions of each state; -inf for the illegal ones."""
    scores = scores.masked_fill(~mask, -torch.inf)
    highest = scores.new_full((states,), -torch.inf).scatter_reduce(
        0, action_state, scores.detach(), "amax"
    )
    exponentials = torch.exp(scores - highest[action_state])
    sums = scores.new_zeros(states).index_add(0, action_state, exponentials)
    return scores - (highest + torch.log(sums))[action_state]


def layout() -> dict[str, Any]:
    """The header entries in which a policy file must agree with this version of nostall."""
    return {
        "version": VERSION,
        "nodes": list(NODE_FEATURES),
        "edges": list(EDGE_FEATURES),
        "actions": list(VARIANTS),
    }


def policy_weights(policy: GraphPolicy) -> dict[str, Tensor]:
    """The weights of a policy by their names in files."""
    weights = {}
    for name, value in policy.state_dict().items():
        module, _, rest = name.partition(".")
        weights[f"{_FILE_NAMES[module]}.{rest}"] = value.contiguous()
    return weights


def load_weights(policy: GraphPolicy, weights: Mapping[str, Tensor]) -> None:
    """Load weights with their names in files; raises ``RuntimeError`` if they do not fit."""
    modules = {file_name: module for module, file_name in _FILE_NAMES.items()}
    state = {}
    for name, value in weights.items():
        module, _, rest = name.partition(".")
        state[f"{modules.get(module, module)}.{rest}"] = value
    policy.load_state_dict(state)


def save_policy(policy: GraphPolicy, path: Path, about: Mapping[str, Any]) -> None:
    """Write a policy file: safetensors with layout, sizes and ``about`` as a JSON header."""
    header = {**layout(), "width": policy.width, "rounds": policy.rounds, "about": dict(about)}
    write_atomically(path, save(policy_weights(policy), {_HEADER: json.dumps(header)}))


def load_policy(path: Path) -> tuple[GraphPolicy, dict[str, Any]]:
    """Read a policy file; returns the policy and the header. Executes nothing from the file.

    Raises :class:`BadInput` for a file that is no policy, or one for other observations or actions.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = parse_json((file.metadata() or {}).get(_HEADER, "null"))
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise BadInput(
            f"{path} is no policy file ({error}); make one with `nostall train`"
        ) from error
    if not isinstance(header, dict):
        raise BadInput(f"{path} has no {_HEADER!r} header; make a policy file with `nostall train`")
    for key, expected in layout().items():
        if header.get(key) != expected:
            raise BadInput(
                f"{path} was trained for other {key}: {str(header.get(key))[:80]}, this nostall "
                f"has {str(expected)[:80]}; train it again with `nostall train`"
            )
    if not all(bool(torch.isfinite(weight).all()) for weight in weights.values()):
        raise BadInput(
            f"{path}: a weight is not a finite number; train the policy again with `nostall train`"
        )
    try:
        policy = GraphPolicy(*_sizes(header, weights))
        load_weights(policy, weights)
    except (KeyError, ValueError, RuntimeError) as error:
        raise BadInput(
            f"{path}: its weights do not fit its header ({str(error).splitlines()[0]}); train it "
            "again with `nostall train`"
        ) from error
    return policy, header


def _sizes(header: Mapping[str, Any], weights: Mapping[str, Tensor]) -> tuple[int, int]:
    """Width and rounds of a policy, which its weights must have, too.

    The weights bound the memory that a policy of these sizes takes.  Raises ``KeyError`` or
    ``ValueError``.
    """
    width, rounds = header["width"], header["rounds"]
    bias = weights[f"{_FILE_NAMES['node_encoder']}.bias"]
    layers = {name.split(".")[1] for name in weights if name.startswith("along.")}
    if (width, rounds) != (len(bias), len(layers)) or not width:
        raise ValueError(
            f"the header states width {str(width)[:20]} and {str(rounds)[:20]} rounds, the weights "
            f"have width {len(bias)} and {len(layers)} rounds"
        )
    return int(width), int(rounds)
