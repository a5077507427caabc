"""The player: a graph network over instructions and dependences, and the file that keeps one.

Each instruction's features travel along dependences, forwards and backwards, for a few rounds;
each candidate instruction then scores its own actions.  Nothing depends on the kernel's size, so
what was learned on some kernels can be tried on others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from nostall.core import BadInput
from nostall.core.files import write_atomically
from nostall.sass.game.edits import VARIANTS
from nostall.sass.game.graph_view import EDGE_FEATURES, NODE_FEATURES
from nostall.sass.game.messages import heard

VERSION = 2
"""2: every instruction that may move is a candidate."""
_HEADER = "nostall.policy"


@dataclass(frozen=True, slots=True)
class Sight:
    """What the player sees of one state: ``nodes`` [n, features], ``edges`` [E, 2] by original
    index, ``values`` [E, features], ``candidates`` [c], ``mask`` [c * variants]."""

    nodes: NDArray[np.float32]
    edges: NDArray[np.int32]
    values: NDArray[np.float32]
    candidates: NDArray[np.int32]
    mask: NDArray[np.bool_]


class GraphPolicy(nn.Module):  # type: ignore[misc]
    """Scores of all actions and the worth of each state, for any number of states at once."""

    def __init__(self, width: int = 32, rounds: int = 3) -> None:
        super().__init__()
        self.width, self.rounds = width, rounds
        self.enter = nn.Linear(len(NODE_FEATURES), width)
        self.room = nn.Linear(len(EDGE_FEATURES), width)
        self.along = nn.ModuleList(nn.Linear(width, width) for _ in range(rounds))
        self.against = nn.ModuleList(nn.Linear(width, width) for _ in range(rounds))
        self.join = nn.ModuleList(nn.Linear(3 * width, width) for _ in range(rounds))
        self.score = nn.Sequential(
            nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, len(VARIANTS))
        )
        self.worth = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
        nn.init.normal_(self.score[-1].weight, std=0.01)
        nn.init.zeros_(self.score[-1].bias)

    def forward(self, sights: Sequence[Sight]) -> tuple[Tensor, Tensor, Tensor]:
        """(log-probabilities of all actions, the state that each belongs to, worths [states])."""
        sizes = np.array([len(s.nodes) for s in sights])
        offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        nodes = torch.from_numpy(np.concatenate([s.nodes for s in sights]))
        edges = np.concatenate([s.edges + o for s, o in zip(sights, offsets, strict=True)])
        room = self.room(torch.from_numpy(np.concatenate([s.values for s in sights])))
        found = torch.relu(self.enter(nodes))
        earlier, later = np.ascontiguousarray(edges.T, dtype=np.int32)
        pairs = ((earlier, later), (later, earlier))
        ways = [(here, there, _share(there, len(nodes))) for here, there in pairs]
        for along, against, join in zip(self.along, self.against, self.join, strict=True):
            parts = [found]
            for layer, (here, there, share) in zip((along, against), ways, strict=True):
                parts.append(heard(layer(found), room, here, there) * share)
            found = found + torch.relu(join(torch.cat(parts, dim=1)))
        state_of = torch.from_numpy(np.repeat(np.arange(len(sights)), sizes))
        whole = found.new_zeros((len(sights), self.width)).index_add(0, state_of, found)
        whole = whole / torch.from_numpy(sizes.astype(np.float32))[:, None]
        candidates = torch.from_numpy(
            np.concatenate([s.candidates + o for s, o in zip(sights, offsets, strict=True)])
        ).long()
        of = state_of[candidates]
        scores = self.score(torch.cat([found[candidates], whole[of]], dim=1)).reshape(-1)
        mask = torch.from_numpy(np.concatenate([s.mask for s in sights]))
        each = of.repeat_interleave(len(VARIANTS))
        return _normalised(scores, mask, each, len(sights)), each, self.worth(whole)[:, 0]


def _share(there: NDArray[np.int32], nodes: int) -> Tensor:
    """[nodes, 1]: 1 / number of dependences that end there."""
    counts = np.maximum(1, np.bincount(there, minlength=nodes)).astype(np.float32)
    return torch.from_numpy(1 / counts)[:, None]


def _normalised(scores: Tensor, mask: Tensor, each: Tensor, states: int) -> Tensor:
    """Log-probabilities among the legal actions of each state; -inf for the others."""
    scores = scores.masked_fill(~mask, -torch.inf)
    highest = scores.new_full((states,), -torch.inf).scatter_reduce(
        0, each, scores.detach(), "amax"
    )
    sums = scores.new_zeros(states).index_add(0, each, torch.exp(scores - highest[each]))
    return scores - (highest + torch.log(sums))[each]


def layout() -> dict[str, Any]:
    """What a policy file must agree with."""
    return {
        "version": VERSION,
        "nodes": list(NODE_FEATURES),
        "edges": list(EDGE_FEATURES),
        "actions": list(VARIANTS),
    }


def save_policy(policy: GraphPolicy, path: Path, about: Mapping[str, Any]) -> None:
    """Write a policy: safetensors with a JSON header (layout, size, ``about``)."""
    header = {**layout(), "width": policy.width, "rounds": policy.rounds, "about": dict(about)}
    weights = {name: value.contiguous() for name, value in policy.state_dict().items()}
    write_atomically(path, save(weights, {_HEADER: json.dumps(header)}))


def load_policy(path: Path) -> tuple[GraphPolicy, dict[str, Any]]:
    """The policy and its header.  Nothing in the file is executed.

    Raises :class:`BadInput` for a file that is no policy, or one for other observations or actions.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(_HEADER, "null"))
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise BadInput(f"{path} is no policy file ({error}); `nostall train` makes one") from error
    if not isinstance(header, dict):
        raise BadInput(f"{path} has no {_HEADER!r} header; `nostall train` makes policy files")
    for key, wanted in layout().items():
        if header.get(key) != wanted:
            raise BadInput(
                f"{path} was trained for other {key}: {str(header.get(key))[:80]}, this nostall "
                f"has {str(wanted)[:80]}; train it anew with `nostall train`"
            )
    try:
        policy = GraphPolicy(int(header["width"]), int(header["rounds"]))
        policy.load_state_dict(weights)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise BadInput(
            f"{path}: its weights do not fit its header ({str(error).splitlines()[0]}); train it "
            "anew with `nostall train`"
        ) from error
    return policy, header
