"""Profiler of a job: measures each layer's times and stored bytes, and the tensors it sends.

The layers run one after another on real values, each between two time stamps: CUDA events on a
GPU, ``perf_counter`` on a CPU.  The profile has the median of several passes.  Passes are added
until the medians of the first, second and last third of them agree, or until a time limit.
"""

from __future__ import annotations

import itertools
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from nostall.parallel.module.eager import compared_model
from nostall.parallel.module.job import Job, to_device
from nostall.parallel.module.layering import Granularity
from nostall.parallel.module.model import Model, can_have_gradient
from nostall.parallel.module.segment import Segment
from nostall.parallel.profile import Layer, Profile, Tensor

WARM_UPS, MIN_PASSES, MAX_PASSES = 3, 12, 192
MAX_SPREAD = 0.05
"""Spread (see :func:`pass_spread`) below which no more passes are measured."""
MAX_SECONDS = 20.0
"""Time limit of the passes that are added because of their spread."""

Tensors = dict[str, torch.Tensor]


def profile_job(
    job: Job,
    *,
    samples: int | None = None,
    device: str = "cpu",
    granularity: Granularity = "block",
    repeats: int | None = None,
    name: str = "",
    note: Callable[[str], None] = warnings.warn,
) -> Profile:
    """Measure a job at ``samples`` samples (default: those of its example batch) on a device.

    ``repeats`` is the number of passes; None adds passes until their spread is small.  ``note`` is
    called with each sentence on what the module does and its layers do not.

    Raises :class:`BadModel` if the job cannot be traced, or if the traced layers have other
    gradients than the module.
    """
    samples, place = samples or job.samples, torch.device(device)
    model = compared_model(job, note, granularity, samples, place)
    return profile_model(model, samples, place, repeats, name)


def profile_model(
    model: Model, samples: int, device: torch.device, repeats: int | None = None, name: str = ""
) -> Profile:
    """Measure a traced model at ``samples`` samples on a device, as :func:`profile_job`.

    The gradients are not compared with those of the module.
    """
    inputs, targets = to_device(model.job.example_batch(samples), device)
    segments = [model.segment(i, i + 1, samples, device) for i in range(len(model))]
    passes = _LayerPasses(segments, inputs, targets, device)
    stored = passes.stored_bytes()
    for _ in range(WARM_UPS):
        passes.run()
    for times in passes.times:
        times.clear()
    _run_passes(passes, repeats)
    passes.clear_gradients()
    seconds = passes.seconds()
    charged: set[int] = set()
    layers = []
    for i, layer in enumerate(model.layer_names):
        # A parameter of several layers is charged to the first.
        own = [p for p in model.stage_parameters(i, i + 1) if id(p) not in charged]
        charged |= {id(p) for p in own}
        forward, backward, inputs_only = (statistics.median(part[i]) for part in seconds)
        layers.append(
            Layer(
                layer,
                forward,
                backward,
                float(sum(p.numel() * p.element_size() for p in own)),
                float(stored[i]),
                max(0.0, backward - inputs_only) if own else 0.0,
            )
        )
    title = name or type(model.job.module).__name__
    totals = pass_seconds(seconds[:2])
    return Profile(
        title,
        tuple(layers),
        profile_tensors(model, samples),
        samples,
        passes=len(totals),
        spread=pass_spread(totals),
    )


def _run_passes(passes: _LayerPasses, repeats: int | None) -> None:
    """Run ``repeats`` passes, or as many as it takes until their spread is small."""
    if repeats is not None:
        for _ in range(repeats):
            passes.run()
        return
    start, count = perf_counter(), MIN_PASSES
    while True:
        for _ in range(count - len(passes.times[0])):
            passes.run()
        spread = pass_spread(pass_seconds(passes.seconds()[:2]))
        is_over = count >= MAX_PASSES or perf_counter() - start > MAX_SECONDS
        if spread is None or spread <= MAX_SPREAD or is_over:
            return
        count *= 2


def pass_seconds(seconds: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Seconds of each pass over all layers, from seconds by kind, layer and pass."""
    layers = [layer for kind in seconds for layer in kind]
    return [sum(values) for values in zip(*layers, strict=True)]


def pass_spread(totals: Sequence[float]) -> float | None:
    """Difference of the medians of the three thirds of the passes, divided by the median of all.

    The thirds are consecutive, so the spread is large while the speed of the machine changes.  None
    for fewer than three passes.
    """
    third = len(totals) // 3
    median = statistics.median(totals) if totals else 0.0
    if third == 0 or median <= 0:
        return None
    medians = [
        statistics.median(totals[first : first + third])
        for first in (0, third, len(totals) - third)
    ]
    return (max(medians) - min(medians)) / median


def profile_tensors(model: Model, samples: int) -> tuple[Tensor, ...]:
    """The tensors that pass between a model's layers, with their sizes for ``samples`` samples."""
    last_consumer: dict[str, int] = {}
    for cut in range(1, len(model)):
        for name in model.crossing(cut):
            last_consumer[name] = cut
    tensors = []
    for name, consumer in last_consumer.items():
        size = model.dtype(name).itemsize
        for extent in model.shape(name, samples):
            size *= extent
        tensors.append(
            Tensor(model.layer_of[name], consumer, float(size), model.has_gradient(name))
        )
    return tuple(tensors)


@dataclass
class _LayerPasses:
    """Forward and backward passes, layer by layer; the autograd graph is cut between layers."""

    segments: Sequence[Segment]
    inputs: Any
    targets: Any
    device: torch.device
    times: tuple[list[Any], list[Any], list[Any]] = field(default_factory=lambda: ([], [], []))
    """Time stamps before and after the forward pass, the backward pass and the gradients of inputs
    alone: per kind, a list of passes, each a list of (start, end) by layer."""

    def run(self) -> None:
        """Time one forward pass and, per layer, the gradients of inputs, then all gradients."""
        marks: list[Any] = []
        layers = self._forward(marks)
        forward = list(itertools.pairwise(marks))
        backward, inputs_only = [], []
        gradients: Tensors = {}
        for segment, inputs, outputs in reversed(layers):
            ends, end_gradients = _with_gradients(outputs, gradients)
            leaves = [t for t in inputs.values() if t.requires_grad]
            start = self._time_stamp()
            if leaves and ends:
                torch.autograd.grad(
                    ends, leaves, end_gradients, retain_graph=True, allow_unused=True
                )
            middle = self._time_stamp()
            if ends:
                torch.autograd.backward(ends, end_gradients)
            inputs_only.append((start, middle))
            backward.append((middle, self._time_stamp()))
            gradients = _input_gradients(segment, inputs, gradients)
        self.times[0].append(forward)
        self.times[1].append(backward[::-1])
        self.times[2].append(inputs_only[::-1])

    def _forward(self, marks: list[Any]) -> list[tuple[Segment, Tensors, Tensors]]:
        """Run the layers; returns each with its inputs and outputs, and appends time stamps."""
        values: Tensors = {}
        layers = []
        marks.append(self._time_stamp())
        for segment in self.segments:
            inputs = {name: _as_leaf(values[name]) for name in segment.used}
            outputs = segment(inputs, self.inputs, self.targets)
            marks.append(self._time_stamp())
            values = {name: outputs.get(name, values.get(name)) for name in segment.sent}
            layers.append((segment, inputs, outputs))
        return layers

    def stored_bytes(self) -> list[int]:
        """Bytes that each layer stores for its backward pass; shared storage counts once."""
        known = {t.untyped_storage().data_ptr() for segment in self.segments for t in segment.own}
        alive: list[torch.Tensor] = []  # keeps storages, so that no address is used twice
        sizes: list[int] = []
        values: Tensors = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                known.add(storage.data_ptr())
                alive.append(tensor)
                sizes[-1] += storage.nbytes()
            return tensor

        for segment in self.segments:
            sizes.append(0)
            inputs = {name: _as_leaf(values[name]) for name in segment.used}
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                outputs = segment(inputs, self.inputs, self.targets)
            alive.extend(outputs.values())
            values = {name: outputs.get(name, values.get(name)) for name in segment.sent}
        return sizes

    def seconds(self) -> tuple[list[list[float]], list[list[float]], list[list[float]]]:
        """Seconds of forward pass, backward pass and gradients of inputs, by layer and pass."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        forward, backward, inputs_only = (
            [[self._elapsed_s(*part[i]) for part in kind] for i in range(len(self.segments))]
            for kind in self.times
        )
        return forward, backward, inputs_only

    def clear_gradients(self) -> None:
        for segment in self.segments:
            for tensor in segment.own:
                tensor.grad = None

    def _time_stamp(self) -> Any:
        if self.device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _elapsed_s(self, start: Any, end: Any) -> float:
        if self.device.type != "cuda":
            return float(end - start)
        return float(start.elapsed_time(end)) * 1e-3


def _with_gradients(
    outputs: Tensors, gradients: Tensors
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Outputs that require a gradient, and these gradients; None for the loss, whose is 1."""
    pairs = [
        (value, None if name == "loss" else gradients.get(name, torch.zeros_like(value)))
        for name, value in outputs.items()
        if value.requires_grad
    ]
    return [value for value, _ in pairs], [gradient for _, gradient in pairs]


def _input_gradients(segment: Segment, inputs: Tensors, gradients: Tensors) -> Tensors:
    """Gradients of the received tensors, including those from later layers they were passed to."""
    result: Tensors = {}
    for name in segment.received:
        own = inputs[name].grad if name in inputs else None
        later = gradients.get(name) if name in segment.sent else None
        parts = [part for part in (own, later) if part is not None]
        if parts:
            result[name] = parts[0] if len(parts) == 1 else parts[0] + parts[1]
    return result


def _as_leaf(value: torch.Tensor) -> torch.Tensor:
    leaf = value.detach()
    return leaf.requires_grad_(can_have_gradient(leaf.dtype))
