"""A job as a graph: one forward pass with its loss, traced by ``torch.export`` at a batch size.

The graph has static shapes, so that whatever can be exported at all can be traced; other batch
sizes are traced anew, and :class:`~nostall.parallel.module.model.Model` sees to it that their
graphs have the same nodes.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch.export.graph_signature import InputKind
from torch.fx import Node

from nostall.parallel.errors import BadModel
from nostall.parallel.module.job import Job

Source = Literal["parameter", "buffer", "constant", "input"]
_ROOT = "module"
_DROPPED = ("_assert", "sym_constrain", "_guards")


class _Whole(torch.nn.Module):  # type: ignore[misc]
    """Module and loss in one, so that the loss belongs to the last layer."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.module = job.module
        self.compute_loss = job.loss

    def forward(self, inputs: Any, targets: Any) -> torch.Tensor:
        named = isinstance(inputs, Mapping)
        output = self.module(**inputs) if named else self.module(*inputs)
        loss: torch.Tensor = self.compute_loss(output, targets)
        return loss


@dataclass(frozen=True, eq=False)
class Traced:
    """The graph of a job at ``samples`` samples.

    ``sources`` says of every placeholder what it stands for: a parameter, buffer or constant with
    its name, or the number of a leaf of (inputs, targets).  ``nodes`` are the operations that the
    loss needs, in an order in which they can run.
    """

    samples: int
    program: torch.fx.GraphModule
    sources: dict[str, tuple[Source, Any]]
    nodes: tuple[Node, ...]
    loss: Node
    constants: dict[str, torch.Tensor]

    @cached_property
    def trained(self) -> frozenset[str]:
        """Operations whose value depends on a parameter, or on chance.

        Everything else is computed anew in each stage that needs it, from the model's inputs.
        """
        found: set[str] = set()
        for node in self.nodes:
            for before in node.all_input_nodes:
                kind = self.sources.get(before.name, ("", None))[0]
                if kind == "parameter" or before.name in found:
                    found.add(node.name)
            if _random(node):
                found.add(node.name)
        return frozenset(found)

    @cached_property
    def shapes(self) -> dict[str, torch.Size | None]:
        """Shape of what each operation returns; None where that is no tensor."""
        return {node.name: getattr(node.meta.get("val"), "shape", None) for node in self.nodes}

    def path(self, node: Node) -> str:
        """The module in whose forward pass the operation was called, '' for the outermost."""
        stack = node.meta.get("nn_module_stack") or {}
        name = str(list(stack.values())[-1][0]) if stack else ""
        if name != _ROOT and not name.startswith(f"{_ROOT}."):
            return ""
        return name.removeprefix(_ROOT).removeprefix(".").partition("@")[0]


def trace(job: Job, samples: int) -> Traced:
    """Export the job at that many samples; raises :class:`BadModel` saying what stands against it.

    Buffers that the forward pass changes are refused: pieces on several ranks would each change
    their own copy.
    """
    whole = _Whole(job)
    whole.train(job.module.training)
    modes = {name: part.training for name, part in job.module.named_modules()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _on_cpu(job.module):
                exported = torch.export.export(whole, job.sized(samples), strict=False)
    except Exception as error:  # whatever torch.export has to say about the user's code
        first = str(error).strip().splitlines() or [""]
        raise BadModel(
            f"torch.export cannot trace the module with its loss at {samples} samples: "
            f"{type(error).__name__}: {first[0][:200]}; make the forward pass exportable "
            "(no branches on values of tensors)"
        ) from error
    finally:
        for name, part in job.module.named_modules():
            part.training = modes[name]
    sources = _sources(exported)
    _make_functional(exported.graph, sources)
    (loss,) = exported.graph.output_node().args[0]
    if not isinstance(loss, Node) or loss.meta["val"].dim() != 0:
        raise BadModel("the loss is no scalar tensor; return a mean or a sum over samples")
    needed = _needed(loss)
    nodes = tuple(n for n in exported.graph.nodes if n in needed and n.op == "call_function")
    constants = {k: v for k, v in exported.constants.items() if isinstance(v, torch.Tensor)}
    return Traced(samples, exported.graph_module, sources, nodes, loss, constants)


@contextmanager
def _on_cpu(module: torch.nn.Module) -> Iterator[None]:
    """Parameters on the processor, without their values, as long as the example is.

    Tracing needs no values, and pieces made before may have moved some of them to a GPU.
    """
    away = [t for t in (*module.parameters(), *module.buffers()) if t.device.type != "cpu"]
    kept = [tensor.data for tensor in away]
    try:
        for tensor in away:
            tensor.data = torch.empty_like(tensor.data, device="cpu")
        yield
    finally:
        for tensor, data in zip(away, kept, strict=True):
            tensor.data = data


def _sources(exported: torch.export.ExportedProgram) -> dict[str, tuple[Source, Any]]:
    kinds: dict[InputKind, Source] = {
        InputKind.PARAMETER: "parameter",
        InputKind.BUFFER: "buffer",
        InputKind.CONSTANT_TENSOR: "constant",
    }
    found: dict[str, tuple[Source, Any]] = {}
    leaf = 0
    for spec in exported.graph_signature.input_specs:
        name = getattr(spec.arg, "name", "")
        if spec.kind is InputKind.USER_INPUT:
            found[name] = ("input", leaf)
            leaf += 1
        elif spec.kind in kinds:
            target = str(spec.target)
            if spec.kind is not InputKind.CONSTANT_TENSOR:
                target = target.removeprefix(f"{_ROOT}.")
            found[name] = (kinds[spec.kind], target)
    return found


def _needed(loss: Node) -> set[Node]:
    needed, waiting = set(), [loss]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting.extend(node.all_input_nodes)
    return needed


def _make_functional(graph: torch.fx.Graph, sources: Mapping[str, tuple[Source, Any]]) -> None:
    """Replace operations in place by those that return a new tensor, and drop checks.

    A tensor that was sent to another stage cannot be changed in place there.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if any(part in str(node.target) for part in _DROPPED):
            if not node.users:
                graph.erase_node(node)
            continue
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        changed = node.args[0]
        plain = _without_side_effect(node.target)
        aliased = isinstance(changed, Node) and (
            _is_view(changed) or any(_is_view(u) for u in changed.users if place[u] < place[node])
        )
        kind = sources.get(changed.name, ("", ""))[0] if isinstance(changed, Node) else ""
        if plain is None or aliased or kind:
            what = f"the {kind} {sources[changed.name][1]}" if kind else "a tensor in place"
            raise BadModel(
                f"{node.target} changes {what}; a stage can change only values of its own; "
                "write that part of the forward pass without changing tensors"
            )
        node.target = plain
        changed.replace_all_uses_with(node, lambda user, node=node: place[user] > place[node])


def _without_side_effect(target: Any) -> Any:
    name = target._schema.name.removeprefix("aten::")
    if not target._schema.name.startswith("aten::") or not name.endswith("_"):
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    return getattr(packet, target._overloadname, None)


def _is_view(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(
        value.alias_info is not None and not value.alias_info.is_write for value in schema.returns
    )


def _random(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
