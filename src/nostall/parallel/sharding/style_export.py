"""Export of a sharding plan as Python text: a ``ParallelStyle`` for each module with parameters.

The text needs PyTorch alone: ``shard_model`` gives the parameters the plan's placements on a
DTensor mesh, and ``shard_batch`` the batch.  Linear layers on one mesh dimension get PyTorch's
ColwiseParallel or RowwiseParallel where these say what the plan says; other modules get ``Placed``,
a style in the text.  DTensor chooses the placements of all other tensors while the step runs, so
its collectives may differ from the plan's.  Operators without a rule of DTensor's that is known to
be right run replicated, and ``check`` in the text compares a step's gradients with one process.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from nostall.parallel.errors import BadModel
from nostall.parallel.module.job import Job
from nostall.parallel.sharding.capture import dtensor_rules
from nostall.parallel.sharding.capture.joint import dispatched_operators
from nostall.parallel.sharding.cost.device_mesh import mesh_text
from nostall.parallel.sharding.graph import Edge, input_placements, output_placements
from nostall.parallel.sharding.placements import Placements, is_sharded, shard_dim
from nostall.parallel.sharding.planners.sharding import ShardingPlan

_MATRIX_PRODUCTS = ("aten.mm.default", "aten.addmm.default")
_REPLICABLE = {"Tensor", "int", "SymInt", "bool", "float"}
"""Types of results of operators that can run replicated."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


@dataclass(frozen=True)
class StyleExport:
    """Python text of a plan, and what it leaves to DTensor."""

    text: str
    standard: int
    """Modules with one of PyTorch's styles."""
    placed: tuple[str, ...]
    """Modules whose parameters need ``Placed``."""
    left_out: Mapping[str, int]
    """Redistributions at operators inside of modules, which no style can state, by operator."""
    replicated: tuple[str, ...]
    """Operators that run on whole tensors, because DTensor has no rule known to be right."""


@dataclass
class _Module:
    """What the plan says about one module that has parameters."""

    parameters: dict[str, Placements] = field(default_factory=dict)
    reads: Placements | None = None
    """Placements in which a linear layer reads its input."""
    arrives: Placements | None = None
    """Placements in which that input is returned by the operator before."""
    returns: Placements | None = None
    """Placements in which the first operator behind a linear layer reads its result."""

    def style(self) -> str:
        """Expression of the module's style."""
        return self._standard() or self._placed()

    @property
    def is_standard(self) -> bool:
        return bool(self._standard())

    def _standard(self) -> str:
        """PyTorch's style of a linear layer on one mesh dimension; empty if none is equal."""
        weight = self.parameters.get("weight")
        if weight is None or len(weight) != 1 or self.reads is None or self.returns is None:
            return ""
        bias = self.parameters.get("bias", weight)
        if weight == ("S0",) and bias == weight and self.reads == ("R",):
            layouts = {"input_layouts": self.arrives, "output_layouts": self.returns}
            return _call("ColwiseParallel", layouts, use_local_output="False")
        bias = self.parameters.get("bias", ("R",))
        if weight == ("S1",) and bias == ("R",) and self.reads == ("S-1",):
            layouts = {"input_layouts": self.arrives, "output_layouts": self.returns}
            return _call("RowwiseParallel", layouts, use_local_output="False")
        return ""

    def _placed(self) -> str:
        values = {name: _list(placements) for name, placements in self.parameters.items()}
        given = [f"{{{', '.join(f'{name!r}: {text}' for name, text in values.items())}}}"]
        if self.reads is not None and "P" not in self.reads:
            given.append(f"reads={_list(self.reads)}")
        if self.returns is not None and "P" not in self.returns:
            given.append(f"returns={_list(self.returns)}")
        return f"Placed({', '.join(given)})"


def export_styles(plan: ShardingPlan, job: Job) -> StyleExport:
    """Python text for the module of a job; the plan was made for this job.

    Raises :class:`BadModel` if the step has an operator that DTensor can neither shard nor
    replicate.
    """
    graph, modules, stated = plan.prices.graph, dict[str, _Module](), set[Edge]()
    for number in graph.parameters:
        operator = graph.operators[number]
        owner, _, name = operator.target.rpartition(".")
        own = modules.setdefault(owner, _Module())
        own.parameters[name] = output_placements(graph, plan.assignment, operator.outputs[0])
        if name == "weight" and isinstance(job.module.get_submodule(owner), nn.Linear):
            stated |= _describe_linear(plan, own, operator.outputs[0])
    styles = {name: module.style() for name, module in modules.items()}
    placed = tuple(name or "(root)" for name, m in modules.items() if not m.is_standard)
    left_out = _left_out(plan, stated)
    replicated = replicated_operators(job)
    text = _text(plan, job, _grouped(styles, job.module), placed, left_out, replicated)
    return StyleExport(text, len(modules) - len(placed), placed, left_out, replicated)


def replicated_operators(job: Job) -> tuple[str, ...]:
    """Names of the operators of a step that DTensor may not shard.

    Those are operators without a rule in DTensor's registries, for which torch 2.13 derives one
    from a decomposition, and means that divide by a count or a weight: the rule for these divides
    by those of a shard.

    Raises :class:`BadModel` for such an operator if it cannot run replicated either.
    """
    names: set[str] = set()
    for operator, args, kwargs in dispatched_operators(job, job.samples):
        leaves = tree_leaves((args, kwargs))
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            continue
        is_mean = dtensor_rules.is_mean(operator, args, kwargs)
        if dtensor_rules.is_known(operator) and not is_mean:
            continue
        results = {str(value.type) for value in operator._schema.returns}
        if not any("Tensor" in text for text in results):
            continue
        if not results <= _REPLICABLE or not dtensor_rules.is_replaceable(operator):
            raise BadModel(
                f"DTensor has no rule for {operator} that is known to be right, and it cannot "
                "run on whole tensors either, so the plan cannot be exported; write the step "
                "without this operator, or run the plan with nostall launch"
            )
        names.add(str(operator))
    return tuple(sorted(names))


def _describe_linear(plan: ShardingPlan, module: _Module, weight: int) -> set[Edge]:
    """Fill in how a linear layer reads its input and returns its result; returns these edges."""
    graph, reached = plan.prices.graph, {weight}
    for edge in graph.edges:
        consumer = graph.operators[edge.consumer]
        if edge.tensor not in reached or consumer.kind == "parameter":
            continue
        if consumer.target not in _MATRIX_PRODUCTS:
            if consumer.kind == "branch" or not consumer.moves_memory:
                reached.update(consumer.outputs)
            continue
        (read, *_) = [
            other
            for other in graph.edges
            if other.consumer == edge.consumer and other.position == edge.position - 1
        ] or [edge]
        module.reads = _from_end(plan, read.tensor, input_placements(graph, plan.assignment, read))
        source = output_placements(graph, plan.assignment, read.tensor)
        module.arrives = _from_end(plan, read.tensor, source)
        (result,) = consumer.outputs
        left = _first_change(plan, result)
        if left is None:
            found = output_placements(graph, plan.assignment, result)
            module.returns = _from_end(plan, result, found)
            return {read}
        found = input_placements(graph, plan.assignment, left)
        module.returns = _from_end(plan, left.tensor, found)
        return {read, left}
    return set()


def _first_change(plan: ShardingPlan, tensor: int) -> Edge | None:
    """The first redistribution of a tensor or of its views."""
    graph, reached = plan.prices.graph, {tensor}
    for edge in graph.edges:
        if edge.tensor not in reached:
            continue
        source = output_placements(graph, plan.assignment, edge.tensor)
        if source != input_placements(graph, plan.assignment, edge):
            return edge
        consumer = graph.operators[edge.consumer]
        if consumer.kind == "branch" or not consumer.moves_memory:
            reached.update(consumer.outputs)
    return None


def _from_end(plan: ShardingPlan, tensor: int, placements: Placements) -> Placements:
    """Placements with the last dimension counted from the end: views merge those before it."""
    last = len(plan.prices.graph.tensors[tensor].shape) - 1
    return tuple("S-1" if is_sharded(p) and shard_dim(p) == last else p for p in placements)


def _left_out(plan: ShardingPlan, stated: set[Edge]) -> Counter[str]:
    graph, found = plan.prices.graph, Counter[str]()
    for edge in dict.fromkeys(edge for edge, _ in plan.cost.collectives):
        producer, consumer = graph.operators[edge.producer], graph.operators[edge.consumer]
        sources = (producer.kind, consumer.kind)
        if edge not in stated and not {"parameter", "input", "loss"} & set(sources):
            found[consumer.target if consumer.kind != "branch" else producer.target] += 1
    return found


def _grouped(styles: Mapping[str, str], module: nn.Module) -> dict[str, str]:
    """Styles by pattern: one ``layers.*.name`` for equal styles of all layers of a list."""
    names = {name for name, _ in module.named_modules()}
    result: dict[str, str] = {}
    for name, style in styles.items():
        pattern = _NUMBER.sub("*", name)
        members = {other for other in names if _NUMBER.sub("*", other) == pattern}
        is_equal = all(styles.get(other) == style for other in members)
        result[pattern if is_equal else name] = style
    return result


def _text(
    plan: ShardingPlan,
    job: Job,
    styles: Mapping[str, str],
    placed: Sequence[str],
    left_out: Counter[str],
    replicated: Sequence[str],
) -> str:
    graph = plan.prices.graph
    template = (files(__package__) / "style_template.txt").read_text(encoding="utf-8")
    batch = {
        operator.target.rpartition(" ")[2]: _list(
            output_placements(graph, plan.assignment, operator.outputs[0])
        )
        for operator in (graph.operators[n] for n in graph.of_kind("input"))
    }
    head = [
        f"Placements of {graph.name} on a mesh of {mesh_text(graph.mesh)} devices, by nostall.",
        "",
        f"Modelled step: {plan.step_s * 1e3:.4g} ms, if the collectives are those of the plan.",
        f"{len(placed)} modules need Placed, because no style of PyTorch says what the plan says.",
        f"{sum(left_out.values())} redistributions inside of modules are left to DTensor"
        + (":" if left_out else "."),
        *(f"  {count} at {target}" for target, count in sorted(left_out.items())),
        f"{len(replicated)} operators run on whole tensors (REPLICATED).",
    ]
    values = {
        "HEAD": "\n".join(head),
        "MESH": repr(graph.mesh),
        "PLAN": "\n".join(f"    {name!r}: {style}," for name, style in styles.items()),
        "BATCH": "\n".join(f"    {leaf}: {placements}," for leaf, placements in batch.items()),
        "REPLICATED": "\n".join(f"    {name!r}," for name in replicated),
        "TIED": "\n".join(f"    {a!r}: {b!r}," for a, b in _tied(job.module)),
    }
    for key, value in values.items():
        template = template.replace(f"@{key}@", value)
    return "\n".join(line for line in template.splitlines()) + "\n"


def _tied(module: nn.Module) -> list[tuple[str, str]]:
    """Further names of parameters with the first name of each."""
    first: dict[int, str] = {}
    pairs = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if (known := first.setdefault(id(parameter), name)) != name:
            pairs.append((name, known))
    return pairs


def _call(name: str, layouts: Mapping[str, Placements | None], **given: str) -> str:
    texts = {key: _placement(value[0]) for key, value in layouts.items() if value is not None}
    return f"{name}({', '.join(f'{k}={v}' for k, v in {**texts, **given}.items())})"


def _list(placements: Iterable[str]) -> str:
    return f"[{', '.join(map(_placement, placements))}]"


def _placement(placement: str) -> str:
    if placement[0] == "S":
        return f"Shard({placement[1:]})"
    return {"R": "Replicate()", "P": "Partial()", "A": 'Partial("avg")'}[placement]
