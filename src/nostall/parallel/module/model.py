"""A job as a row of layers that can be cut between any two.

Two traces at different batch sizes tell how each tensor between layers grows with the samples: in
one dimension, entry by entry (slices of it can be sent to several replicas), or not at all (every
replica gets it whole, and its gradients add up).  Where a tensor does neither, the layers on both
sides of it are merged.
"""

from __future__ import annotations

import hashlib
from functools import cached_property

import torch
from torch.fx import Node

from nostall.parallel.errors import BadModel
from nostall.parallel.module.graph import Traced, trace
from nostall.parallel.module.job import Job
from nostall.parallel.module.layering import Granularity, runs, units
from nostall.parallel.module.piece import Piece, make_piece

_SIZES = (2, 3)
"""Batch sizes of the two traces; not 1, at which sizes that broadcast look alike."""

_UNCLEAR = -1
_LEFT_OUT = "aten.contiguous.default"
"""torch.export leaves it out where the tensor is contiguous, which depends on the batch size."""


class Model:
    """The layers of a job.

    ``names`` are the layers' names, ``layer`` the layer of each operation that depends on a
    parameter, ``rows`` the dimension of its value that counts samples (None: no dimension does).
    Raises :class:`BadModel` for what cannot be traced.
    """

    def __init__(self, job: Job, granularity: Granularity = "block") -> None:
        self.job = job
        self.granularity = granularity
        self._traces: dict[int, Traced] = {}
        self._pieces: dict[tuple[int, int, int, str], Piece] = {}
        base, other = (self._trace(size) for size in _SIZES)
        self._nodes = _structure(base)
        self._check(other)
        self._base = base
        self.rows = {
            name: dim
            for name, shape in base.shapes.items()
            if (dim := _growth(shape, other.shapes.get(name))) != _UNCLEAR
            and str(self._node[name].target) != _LEFT_OUT
        }
        self.names, self.layer = self._layers()

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def fingerprint(self) -> str:
        """Of layers and operations; equal on all ranks of a run."""
        text = repr((self.names, self._nodes, self.layer))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """By name; a parameter with two names is there under both."""
        return dict(self.job.module.named_parameters(remove_duplicate=False))

    def crossing(self, cut: int) -> tuple[str, ...]:
        """Operations before the cut whose values layers behind it need."""
        return self._crossing(self.layer, cut)

    def shape(self, name: str, samples: int) -> tuple[int, ...]:
        """Shape of an operation's value at that many samples."""
        shape = list(self._base.shapes[name] or ())
        if (dim := self.rows[name]) is not None:
            shape[dim] = samples
        return tuple(shape)

    def dtype(self, name: str) -> torch.dtype:
        """Element type of an operation's value."""
        found: torch.dtype = self._node[name].meta["val"].dtype
        return found

    @property
    def loss_dtype(self) -> torch.dtype:
        """Element type of the loss."""
        found: torch.dtype = self._base.loss.meta["val"].dtype
        return found

    def piece(self, first: int, end: int, samples: int, device: torch.device) -> Piece:
        """The layers from ``first`` to ``end`` (exclusive) as a function, on a device."""
        key = (first, end, samples, str(device))
        if key not in self._pieces:
            traced = self._trace(samples)
            self._check(traced)
            inside = {name for name, layer in self.layer.items() if first <= layer < end}
            received = self.crossing(first) if first else ()
            sent = self.crossing(end) if end < len(self) else ()
            self._pieces[key] = make_piece(self.job, traced, inside, received, sent, device)
        return self._pieces[key]

    def stage_parameters(self, first: int, end: int) -> list[torch.nn.Parameter]:
        """Parameters that these layers use, each once, in order of use."""
        used = {
            id(p): p
            for node in self._base.nodes
            if first <= self.layer.get(node.name, -1) < end
            for before in node.all_input_nodes
            if (p := self._parameter(before)) is not None
        }
        return list(used.values())

    def _parameter(self, node: Node) -> torch.nn.Parameter | None:
        kind, name = self._base.sources.get(node.name, ("", ""))
        return self.parameters[name] if kind == "parameter" else None

    @cached_property
    def _node(self) -> dict[str, Node]:
        return {node.name: node for node in self._base.nodes}

    def _trace(self, samples: int) -> Traced:
        if samples not in self._traces:
            self._traces[samples] = trace(self.job, samples)
        return self._traces[samples]

    def _check(self, other: Traced) -> None:
        if _structure(other) != self._nodes:
            raise BadModel(
                f"the forward pass does other operations at {other.samples} samples than at "
                f"{_SIZES[0]}; pieces of it do not fit together; write it without branches on the "
                "batch size"
            )

    def _layers(self) -> tuple[tuple[str, ...], dict[str, int]]:
        trained = [n for n in self._base.nodes if n.name in self._base.trained]
        if not trained:
            raise BadModel("the loss depends on no parameter; there is nothing to train")
        paths = [self._base.path(node) for node in trained]
        named = runs(paths, units(self.job.module, self.granularity))
        layer: dict[str, int] = {}
        names: list[str] = []
        for node, name in zip(trained, named, strict=True):
            if not names or names[-1] != name:
                names.append(name)
            layer[node.name] = len(names) - 1
        for cut in range(len(names) - 1, 0, -1):
            if any(name not in self.rows for name in self._crossing(layer, cut)):
                layer = {name: at - (at >= cut) for name, at in layer.items()}
                del names[cut]
        return tuple(names), layer

    def _crossing(self, layer: dict[str, int], cut: int) -> tuple[str, ...]:
        return tuple(
            node.name
            for node in self._base.nodes
            if layer.get(node.name, cut) < cut
            and any(layer.get(user.name, -1) >= cut for user in node.users)
        )


def _structure(traced: Traced) -> tuple[tuple[str, str], ...]:
    targets = ((node.name, str(node.target)) for node in traced.nodes)
    return tuple((name, target) for name, target in targets if target != _LEFT_OUT)


def _growth(shape: torch.Size | None, grown: torch.Size | None) -> int | None:
    """The dimension that counts samples, None where no dimension does."""
    if shape is None or grown is None or len(shape) != len(grown):
        return _UNCLEAR
    changed = [d for d in range(len(shape)) if shape[d] != grown[d]]
    if not changed:
        return None
    (dim, *more) = changed
    return dim if not more and (shape[dim], grown[dim]) == _SIZES else _UNCLEAR
