"""A job as a sequence of layers that can be cut between any two.

Traces at two batch sizes show how each tensor between layers depends on the number of samples.
Either one dimension counts samples, so slices of the tensor can be sent to several replicas, or no
dimension does, so every replica receives the whole tensor and its gradients are summed.  If neither
holds for a tensor that crosses a cut, the layers on both sides of the cut are merged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import torch
from torch.fx import Node

from nostall.parallel.errors import BadModel
from nostall.parallel.module.effects import random_operators
from nostall.parallel.module.graph import TracedJob, trace
from nostall.parallel.module.job import Job
from nostall.parallel.module.layering import Granularity, layer_modules, layer_names
from nostall.parallel.module.precision import coarsest, computed_dtypes
from nostall.parallel.module.segment import Segment, make_segment

_TRACED_SAMPLES = (2, 3)
"""Batch sizes of the two traces; not 1, because dimensions of size 1 may come from broadcasting."""

_UNKNOWN_DIM = -1
_OPTIONAL_OPERATION = "aten.contiguous.default"
"""torch.export omits this if the tensor is contiguous, which may depend on the batch size."""


class Model:
    """The layers of a job.

    Raises :class:`BadModel` if the job cannot be traced, if its operations depend on the batch
    size, or if its loss depends on no parameter.
    """

    def __init__(
        self, job: Job, granularity: Granularity = "block", traced: Job | None = None
    ) -> None:
        """``traced`` is the job in the types of the computation, if these are not those of ``job``.

        Segments then convert the parameters of ``job``, so gradients have the parameters' types.
        """
        self.job = job
        self.traced = traced or job
        self.granularity = granularity
        self._traces: dict[int, TracedJob] = {}
        self._segments: dict[tuple[int, int, int, str], Segment] = {}
        base, larger = (self._trace(size) for size in _TRACED_SAMPLES)
        self._operations = _operations(base)
        self._check_operations(larger)
        self._base = base
        self.sample_dim: dict[str, int | None] = {
            name: dim
            for name, shape in base.shapes.items()
            if (dim := _sample_dim(shape, larger.shapes.get(name))) != _UNKNOWN_DIM
            and str(self._node[name].target) != _OPTIONAL_OPERATION
        }
        """Per operation, the dimension of its value that counts samples; None if no dimension does.
        Operations for which neither is certain are left out."""
        self.layer_names, self.layer_of = self._assign_layers()
        """Names of the layers, and the layer number of each operation that belongs to a layer."""

    def __len__(self) -> int:
        return len(self.layer_names)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of layers and operations; equal on all ranks of a run."""
        text = repr((self.layer_names, self._operations, self.layer_of))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Parameters by name; a parameter with two names is listed under both."""
        return dict(self.job.module.named_parameters(remove_duplicate=False))

    def crossing(self, cut: int) -> tuple[str, ...]:
        """Names of the operations before the cut whose values layers after it need."""
        return self._crossing(self.layer_of, cut)

    def shape(self, name: str, samples: int) -> tuple[int, ...]:
        """Shape of an operation's value for ``samples`` samples."""
        shape = list(self._base.shapes[name] or ())
        if (dim := self.sample_dim[name]) is not None:
            shape[dim] = samples
        return tuple(shape)

    def dtype(self, name: str) -> torch.dtype:
        """Element type of an operation's value."""
        dtype: torch.dtype = self._node[name].meta["val"].dtype
        return dtype

    def has_gradient(self, name: str) -> bool:
        """Whether an operation's value has a gradient: floating-point and complex tensors do."""
        return can_have_gradient(self.dtype(name))

    @cached_property
    def random_operations(self) -> tuple[str, ...]:
        """Operators of the forward pass that draw random numbers, each once."""
        return random_operators(self._base.nodes)

    @cached_property
    def computation_dtype(self) -> torch.dtype:
        """The coarsest element type of a value that depends on a parameter.

        Under autocast it differs from that of the parameters.
        """
        inside = [node for node in self._base.nodes if node.name in self.layer_of]
        return coarsest(computed_dtypes(inside))

    def sample_sums(self, cut: int) -> tuple[str, ...]:
        """Values that cross the cut, are computed from samples and have no sample dimension.

        An example is a mean over the batch.  Each replica computes such a value from its own
        samples.
        """
        return tuple(
            name
            for name in self.crossing(cut)
            if self.sample_dim[name] is None and name in self._depends_on_samples
        )

    @cached_property
    def _depends_on_samples(self) -> frozenset[str]:
        """Names of the operations whose value depends on the samples of the batch."""
        names: set[str] = set()
        for node in self._base.nodes:
            arguments = node.all_input_nodes
            if any(a.name in names or _has_samples(a, self._base) for a in arguments):
                names.add(node.name)
        return frozenset(names)

    @property
    def loss_dtype(self) -> torch.dtype:
        """Element type of the loss."""
        dtype: torch.dtype = self._base.loss.meta["val"].dtype
        return dtype

    def segment(self, first: int, end: int, samples: int, device: torch.device) -> Segment:
        """Layers ``first`` to ``end`` (exclusive) for ``samples`` samples on a device; cached."""
        key = (first, end, samples, str(device))
        if key not in self._segments:
            traced = self._trace(samples)
            self._check_operations(traced)
            inside = {name for name, layer in self.layer_of.items() if first <= layer < end}
            received = self.crossing(first) if first else ()
            sent = self.crossing(end) if end < len(self) else ()
            self._segments[key] = make_segment(self.job, traced, inside, received, sent, device)
        return self._segments[key]

    def stage_parameters(self, first: int, end: int) -> list[torch.nn.Parameter]:
        """Distinct parameters of layers ``first`` to ``end`` (exclusive), in order of use."""
        used = {
            id(p): p
            for node in self._base.nodes
            if first <= self.layer_of.get(node.name, -1) < end
            for argument in node.all_input_nodes
            if (p := self._parameter(argument)) is not None
        }
        return list(used.values())

    @cached_property
    def trained(self) -> frozenset[int]:
        """Identities of the parameters that have gradients: the loss depends on them, trainable.

        Not those that it reads under ``torch.no_grad`` or through ``detach`` alone.
        """
        found: set[int] = set()
        seen: set[Node] = set()
        stack = [self._base.loss]
        while stack:
            node = stack.pop()
            if node in seen or _stops_gradient(node):
                continue
            seen.add(node)
            parameter = self._parameter(node)
            if parameter is not None and parameter.requires_grad:
                found.add(id(parameter))
            stack.extend(node.all_input_nodes)
        return frozenset(found)

    def _parameter(self, node: Node) -> torch.nn.Parameter | None:
        kind, name = self._base.sources.get(node.name, ("", ""))
        return self.parameters[name] if kind == "parameter" else None

    @cached_property
    def _node(self) -> dict[str, Node]:
        return {node.name: node for node in self._base.nodes}

    def _trace(self, samples: int) -> TracedJob:
        if samples not in self._traces:
            self._traces[samples] = trace(self.traced, samples)
        return self._traces[samples]

    def _check_operations(self, traced: TracedJob) -> None:
        if _operations(traced) != self._operations:
            raise BadModel(
                f"the forward pass has other operations at {traced.samples} samples than at "
                f"{_TRACED_SAMPLES[0]}, so segments for different batch sizes do not fit together; "
                "write it without branches on the batch size"
            )

    def _assign_layers(self) -> tuple[tuple[str, ...], dict[str, int]]:
        """Names of the layers, and the layer number of each operation that belongs to a layer."""
        nodes = [n for n in self._base.nodes if n.name in self._base.layer_operations]
        if not nodes:
            raise BadModel("the loss depends on no parameter; there is nothing to train")
        if not any(p.requires_grad for p in self.parameters.values()):
            raise BadModel(
                "all parameters are frozen (requires_grad is False), so there is nothing to train; "
                "set requires_grad of the parameters that the training changes"
            )
        paths = [self._base.module_path(node) for node in nodes]
        layers = layer_names(paths, layer_modules(self.job.module, self.granularity))
        layer_of: dict[str, int] = {}
        names: list[str] = []
        for node, name in zip(nodes, layers, strict=True):
            if not names or names[-1] != name:
                names.append(name)
            layer_of[node.name] = len(names) - 1
        for cut in range(len(names) - 1, 0, -1):
            if any(name not in self.sample_dim for name in self._crossing(layer_of, cut)):
                layer_of = {name: layer - (layer >= cut) for name, layer in layer_of.items()}
                del names[cut]
        return tuple(names), layer_of

    def _crossing(self, layer_of: dict[str, int], cut: int) -> tuple[str, ...]:
        return tuple(
            node.name
            for node in self._base.nodes
            if layer_of.get(node.name, cut) < cut
            and any(layer_of.get(user.name, -1) >= cut for user in node.users)
        )


def can_have_gradient(dtype: torch.dtype) -> bool:
    """Whether tensors of this element type can have gradients."""
    return bool(dtype.is_floating_point or dtype.is_complex)


def _stops_gradient(node: Node) -> bool:
    """Whether nothing before an operation has a gradient through it."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and not can_have_gradient(value.dtype):
        return True
    if node.target is torch.ops.aten.detach.default:
        return True
    is_mode = str(node.target).endswith("wrap_with_set_grad_enabled")
    return is_mode and node.args[0] is False


def _has_samples(node: Node, traced: TracedJob) -> bool:
    """Whether a node is a tensor of the batch that has one entry per sample."""
    shape: Sequence[int] = getattr(node.meta.get("val"), "shape", ())
    is_input = traced.sources.get(node.name, ("", None))[0] == "input"
    return is_input and len(shape) > 0 and shape[0] == traced.samples


def _operations(traced: TracedJob) -> tuple[tuple[str, str], ...]:
    """Name and target of each operation that is the same at every batch size."""
    targets = ((node.name, str(node.target)) for node in traced.nodes)
    return tuple((name, target) for name, target in targets if target != _OPTIONAL_OPERATION)


def _sample_dim(shape: torch.Size | None, larger: torch.Size | None) -> int | None:
    """The dimension that counts samples, from the shapes of a value at both traced batch sizes.

    None if the shapes are equal, ``_UNKNOWN_DIM`` if they differ in any other way, or depend on
    values (``x[mask]``).
    """
    if shape is None or larger is None or len(shape) != len(larger):
        return _UNKNOWN_DIM
    if any(isinstance(extent, torch.SymInt) for extent in (*shape, *larger)):
        return _UNKNOWN_DIM
    changed = [d for d in range(len(shape)) if shape[d] != larger[d]]
    if not changed:
        return None
    (dim, *others) = changed
    is_sample_dim = not others and (shape[dim], larger[dim]) == _TRACED_SAMPLES
    return dim if is_sample_dim else _UNKNOWN_DIM
