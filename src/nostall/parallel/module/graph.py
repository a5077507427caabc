"""Traced graph of a job: one forward pass with its loss, from ``torch.export`` at one batch size.

The graph has static shapes, because more modules can be exported with these.  Other batch sizes are
traced separately; :class:`~nostall.parallel.module.model.Model` checks that their graphs have the
same operations.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch.export.graph_signature import InputKind
from torch.fx import Node

from nostall.core.errors import one_line
from nostall.parallel.errors import BadModel
from nostall.parallel.module.effects import (
    PythonState,
    batch_statistics_operator,
    changed_arguments,
    is_random,
    is_view,
    refuse_changed_state,
)
from nostall.parallel.module.job import Job

SourceKind = Literal["parameter", "buffer", "constant", "input"]
ROOT = "module"
"""Attribute of :class:`ModuleWithLoss` with the job's module; prefix of names in the graph."""
_CHECKS = ("_assert", "sym_constrain", "_guards")
"""Parts of the names of operations that only check values; the graph does without them."""


class ModuleWithLoss(torch.nn.Module):  # type: ignore[misc]
    """A job's module followed by its loss, so that the loss belongs to the last layer."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.module = job.module
        self.job = job
        self.changed: tuple[str, ...] = ()
        """Names of the values in Python that the last forward pass changed."""
        self.replaced: list[str] = []
        """Names of the buffers in whose place it put other tensors."""

    def forward(self, inputs: Any, targets: Any) -> torch.Tensor:
        before = PythonState(self.job.module, self.job.loss)
        buffers = dict(self.module.named_buffers())
        loss = self.job.run(inputs, targets, self.module)
        self.changed = PythonState(self.job.module, self.job.loss).changed_since(before)
        now = dict(self.module.named_buffers())
        self.replaced = [name for name, b in buffers.items() if now.get(name) is not b]
        return loss


@dataclass(frozen=True, eq=False)
class TracedJob:
    """The graph of a job at one batch size."""

    samples: int
    graph_module: torch.fx.GraphModule
    sources: dict[str, tuple[SourceKind, Any]]
    """Source of each placeholder: a parameter, buffer or constant with its name, or an input
    with its number among the leaves of (inputs, targets)."""
    nodes: tuple[Node, ...]
    """Operations that the loss depends on, in an order in which they can run."""
    loss: Node
    constants: dict[str, torch.Tensor]

    @cached_property
    def layer_operations(self) -> frozenset[str]:
        """Names of operations that depend on a parameter or on random numbers.

        Each of these belongs to one layer.  All others are computed from the model's inputs in each
        stage that needs them.
        """
        names: set[str] = set()
        for node in self.nodes:
            for argument in node.all_input_nodes:
                kind = self.sources.get(argument.name, ("", None))[0]
                if kind == "parameter" or argument.name in names:
                    names.add(node.name)
            if is_random(node):
                names.add(node.name)
        return frozenset(names)

    @cached_property
    def shapes(self) -> dict[str, torch.Size | None]:
        """Shape of each operation's result; None if the result is not a tensor."""
        return {node.name: getattr(node.meta.get("val"), "shape", None) for node in self.nodes}

    def module_path(self, node: Node) -> str:
        """Name of the module in whose forward pass an operation is called; empty for the root."""
        stack = node.meta.get("nn_module_stack") or {}
        name = str(list(stack.values())[-1][0]) if stack else ""
        if name != ROOT and not name.startswith(f"{ROOT}."):
            return ""
        return name.removeprefix(ROOT).removeprefix(".").partition("@")[0]


def trace(job: Job, samples: int) -> TracedJob:
    """Trace a job with ``samples`` samples.

    Raises :class:`BadModel` if ``torch.export`` cannot trace it, if the loss is not a scalar, or if
    the forward pass has an effect that slices of a batch cannot have: it changes a parameter, a
    buffer or a value in Python, or takes statistics from the batch.
    """
    exported = _export(job, samples)
    sources = _placeholder_sources(exported)
    if name := batch_statistics_operator(exported.graph.nodes):
        raise BadModel(
            f"{name} takes its statistics from the batch: over slices of a micro-batch they differ "
            "from those of the whole; give it training=False, or use GroupNorm or LayerNorm"
        )
    _make_functional(exported.graph, sources)
    (loss,) = exported.graph.output_node().args[0]
    if not isinstance(loss, Node) or loss.meta["val"].dim() != 0:
        raise BadModel("the loss is no scalar tensor; return a mean or a sum over samples")
    needed = _with_predecessors(loss)
    nodes = tuple(n for n in exported.graph.nodes if n in needed and n.op == "call_function")
    constants = {k: v for k, v in exported.constants.items() if isinstance(v, torch.Tensor)}
    return TracedJob(samples, exported.graph_module, sources, nodes, loss, constants)


def _export(job: Job, samples: int) -> torch.export.ExportedProgram:
    """Export the module with its loss; the training modes of its submodules stay as they are."""
    module = ModuleWithLoss(job)
    module.training = job.module.training  # and no submodule's: BatchNorm may be in eval mode
    modes = {name: part.training for name, part in job.module.named_modules()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _on_cpu(job.module):
                batch = job.example_batch(samples)
                exported = torch.export.export(module, batch, strict=False)
    except Exception as error:  # torch.export and the user's code raise errors of any class
        raise BadModel(
            f"torch.export cannot trace the module with its loss at {samples} samples: "
            f"{one_line(error)}; make the forward pass exportable "
            "(no branches on values of tensors)"
        ) from error
    finally:
        for name, part in job.module.named_modules():
            part.training = modes[name]
    refuse_changed_state(module.changed)
    return exported


@contextmanager
def _on_cpu(module: torch.nn.Module) -> Iterator[None]:
    """Replace parameters and buffers on a GPU by uninitialized CPU tensors, temporarily.

    The example batch is on the CPU, and tracing needs no values.  Parameters may be on a GPU
    because segments that were created earlier moved them.
    """
    on_gpu = [t for t in (*module.parameters(), *module.buffers()) if t.device.type != "cpu"]
    gpu_data = [tensor.data for tensor in on_gpu]
    try:
        for tensor in on_gpu:
            tensor.data = torch.empty_like(tensor.data, device="cpu")
        yield
    finally:
        for tensor, data in zip(on_gpu, gpu_data, strict=True):
            tensor.data = data


def _placeholder_sources(
    exported: torch.export.ExportedProgram,
) -> dict[str, tuple[SourceKind, Any]]:
    kinds: dict[InputKind, SourceKind] = {
        InputKind.PARAMETER: "parameter",
        InputKind.BUFFER: "buffer",
        InputKind.CONSTANT_TENSOR: "constant",
    }
    sources: dict[str, tuple[SourceKind, Any]] = {}
    leaf = 0
    for spec in exported.graph_signature.input_specs:
        name = getattr(spec.arg, "name", "")
        if spec.kind is InputKind.USER_INPUT:
            sources[name] = ("input", leaf)
            leaf += 1
        elif spec.kind in kinds:
            target = str(spec.target)
            if spec.kind is not InputKind.CONSTANT_TENSOR:
                target = target.removeprefix(f"{ROOT}.")
            sources[name] = (kinds[spec.kind], target)
    return sources


def _with_predecessors(loss: Node) -> set[Node]:
    needed, stack = set(), [loss]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    return needed


def _make_functional(graph: torch.fx.Graph, sources: Mapping[str, tuple[SourceKind, Any]]) -> None:
    """Replace in-place operations by ones that return a new tensor, and remove checks.

    A tensor that was sent to another stage cannot be changed in place there.  Raises
    :class:`BadModel` if an operation changes a view, a tensor that has views, or a parameter,
    buffer or input, if it has no functional variant, or if a sub-graph changes a tensor that it is
    given.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if any(part in str(node.target) for part in _CHECKS):
            if not node.users:
                graph.erase_node(node)
            continue
        for argument in changed_arguments(node):
            raise _changes(f"a part under {node.target}", argument, sources)
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        changed = node.args[0]
        functional = _functional_variant(node.target)
        is_aliased = isinstance(changed, Node) and (
            is_view(changed)
            or any(is_view(u) for u in changed.users if position[u] < position[node])
        )
        is_source = isinstance(changed, Node) and changed.name in sources
        if functional is None or is_aliased or is_source:
            raise _changes(str(node.target), changed, sources)
        node.target = functional
        changed.replace_all_uses_with(node, lambda user, node=node: position[user] > position[node])


def _changes(
    operation: str, changed: Any, sources: Mapping[str, tuple[SourceKind, Any]]
) -> BadModel:
    kind, name = sources.get(getattr(changed, "name", ""), ("", ""))
    what = f"the {kind} {name}" if kind else "a tensor in place"
    return BadModel(
        f"{operation} changes {what}; a stage can change only its own values; "
        "write that part of the forward pass without changing tensors"
    )


def _functional_variant(target: Any) -> Any:
    """``aten.add.Tensor`` for ``aten.add_.Tensor``; None if there is none."""
    name = target._schema.name.removeprefix("aten::")
    if not target._schema.name.startswith("aten::") or not name.endswith("_"):
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    return getattr(packet, target._overloadname, None)
