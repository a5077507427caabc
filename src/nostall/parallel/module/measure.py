"""A job's profile, measured: times of each layer, what it stores, what it hands on.

Layers run one after another on real values, each between two clock readings: CUDA events on a GPU,
the processor's clock otherwise.  The median of several passes counts.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from nostall.parallel.module.job import Job, on_device
from nostall.parallel.module.layering import Granularity
from nostall.parallel.module.model import Model
from nostall.parallel.module.piece import Piece
from nostall.parallel.profile import Layer, Profile, Tensor

WARM_UPS, REPEATS = 3, 10


def profile_job(
    job: Job,
    *,
    samples: int | None = None,
    device: str = "cpu",
    granularity: Granularity = "block",
    repeats: int = REPEATS,
    name: str = "",
) -> Profile:
    """Measure a job at ``samples`` samples (the example's number) on a device.

    Raises :class:`BadModel` for what cannot be traced.
    """
    model = Model(job, granularity)
    return profile_model(model, samples or job.samples, torch.device(device), repeats, name)


def profile_model(
    model: Model, samples: int, device: torch.device, repeats: int = REPEATS, name: str = ""
) -> Profile:
    """As :func:`profile_job`, for a model that was traced before."""
    inputs, targets = on_device(model.job.sized(samples), device)
    pieces = [model.piece(i, i + 1, samples, device) for i in range(len(model))]
    passes = _Passes(pieces, inputs, targets, device)
    stored = passes.stored()
    for _ in range(WARM_UPS):
        passes.run()
    for part in passes.times:
        part.clear()
    for _ in range(repeats):
        passes.run()
    passes.clear_gradients()
    charged: set[int] = set()
    layers = []
    for i, layer in enumerate(model.names):
        own = [p for p in model.stage_parameters(i, i + 1) if id(p) not in charged]
        charged |= {id(p) for p in own}
        forward, backward, inner = (statistics.median(part[i]) for part in passes.seconds())
        layers.append(
            Layer(
                layer,
                forward,
                backward,
                float(sum(p.numel() * p.element_size() for p in own)),
                float(stored[i]),
                max(0.0, backward - inner) if own else 0.0,
            )
        )
    title = name or type(model.job.module).__name__
    return Profile(title, tuple(layers), tensors_of(model, samples), samples)


def tensors_of(model: Model, samples: int) -> tuple[Tensor, ...]:
    """What layers hand to later ones, in bytes at that many samples."""
    last: dict[str, int] = {}
    for cut in range(1, len(model)):
        for crossing in model.crossing(cut):
            last[crossing] = cut
    found = []
    for crossing, end in last.items():
        size = model.dtype(crossing).itemsize
        for extent in model.shape(crossing, samples):
            size *= extent
        gradient = model.dtype(crossing).is_floating_point
        found.append(Tensor(model.layer[crossing], end, float(size), gradient))
    return tuple(found)


@dataclass
class _Passes:
    """Forward and backward passes, layer by layer; each layer's tensors are cut from the next."""

    pieces: Sequence[Piece]
    inputs: Any
    targets: Any
    device: torch.device
    times: tuple[list[Any], list[Any], list[Any]] = field(default_factory=lambda: ([], [], []))

    def run(self) -> None:
        """One forward and one backward pass; and one of the gradients that go further back."""
        marks: list[Any] = []
        ran = self._forward(marks)
        forward = list(itertools.pairwise(marks))
        backward, inner = [], []
        gradients: dict[str, torch.Tensor] = {}
        for piece, (given, made) in reversed(ran):
            ends, seeds = _ends(made, gradients)
            into = [t for t in given.values() if t.requires_grad]
            start = self._now()
            if into and ends:
                torch.autograd.grad(ends, into, seeds, retain_graph=True, allow_unused=True)
            middle = self._now()
            if ends:
                torch.autograd.backward(ends, seeds)
            inner.append((start, middle))
            backward.append((middle, self._now()))
            gradients = _handed(piece, given, gradients)
        self.times[0].append(forward)
        self.times[1].append(backward[::-1])
        self.times[2].append(inner[::-1])

    def _forward(self, marks: list[Any]) -> list[tuple[Piece, Any]]:
        values: dict[str, torch.Tensor] = {}
        ran = []
        marks.append(self._now())
        for piece in self.pieces:
            given = {name: _cut(values[name]) for name in piece.used}
            made = piece(given, self.inputs, self.targets)
            marks.append(self._now())
            values = {name: made.get(name, values.get(name)) for name in piece.sent}
            ran.append((piece, (given, made)))
        return ran

    def stored(self) -> list[int]:
        """Bytes that each layer keeps for its backward pass; shared storage counts once."""
        known = {t.untyped_storage().data_ptr() for piece in self.pieces for t in piece.own}
        kept: list[torch.Tensor] = []
        sizes: list[int] = []
        values: dict[str, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                known.add(storage.data_ptr())
                kept.append(tensor)
                sizes[-1] += storage.nbytes()
            return tensor

        for piece in self.pieces:
            sizes.append(0)
            given = {name: _cut(values[name]) for name in piece.used}
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                made = piece(given, self.inputs, self.targets)
            kept.extend(made.values())  # so that no address is used twice
            values = {name: made.get(name, values.get(name)) for name in piece.sent}
        return sizes

    def seconds(self) -> tuple[list[list[float]], list[list[float]], list[list[float]]]:
        """Forward, backward and inner gradients' seconds, by layer and pass."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        forward, backward, inner = (
            [[self._between(*part[i]) for part in kind] for i in range(len(self.pieces))]
            for kind in self.times
        )
        return forward, backward, inner

    def clear_gradients(self) -> None:
        for piece in self.pieces:
            for tensor in piece.own:
                tensor.grad = None

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        if self.device.type != "cuda":
            return float(end - start)
        return float(start.elapsed_time(end)) * 1e-3


def _ends(
    made: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Values that have a gradient, with it; the loss's is 1."""
    pairs = [
        (value, None if name == "loss" else gradients.get(name, torch.zeros_like(value)))
        for name, value in made.items()
        if value.requires_grad
    ]
    return [value for value, _ in pairs], [seed for _, seed in pairs]


def _handed(
    piece: Piece, given: dict[str, torch.Tensor], gradients: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Gradients of what the piece received, those handed through added."""
    found: dict[str, torch.Tensor] = {}
    for name in piece.received:
        parts = [
            part
            for part in (
                given[name].grad if name in given else None,
                gradients.get(name) if name in piece.sent else None,
            )
            if part is not None
        ]
        if parts:
            found[name] = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    return found


def _cut(value: torch.Tensor) -> torch.Tensor:
    cut = value.detach()
    return cut.requires_grad_(cut.is_floating_point())
