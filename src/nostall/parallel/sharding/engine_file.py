"""Files of plans that one of PyTorch's own engines runs, as JSON: DDP, FSDP2 with its wrapping, or
tensor parallelism with the styles of layers.

The predicted time is that of the sharding plan that places the tensors as the engine does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from nostall.parallel.cluster import Cluster, parse_cluster
from nostall.parallel.errors import BadPlan
from nostall.parallel.sharding.cost.timeline import timeline
from nostall.parallel.sharding.plan_file import StrictRecord, read_record
from nostall.parallel.sharding.planners.sharding import ShardingPlan

VERSION_KEY = "nostall_engine_plan"
"""Key of the version, by which a reader recognises these files."""
CANDIDATES = "candidates"
"""Key of a sharding plan's file with documents of the engines' plans of the same step."""
TorchEngine = Literal["ddp", "fsdp2", "tp"]
RULES_OF: Mapping[TorchEngine, str] = {
    "ddp": "data-parallel",
    "fsdp2": "fsdp",
    "tp": "tensor-parallel",
}
"""The rule of shardings that places tensors as an engine does.  The one of ``tp`` exchanges logits
for the loss, where the engine exchanges their maxima and sums."""
Style = Literal["colwise", "rowwise", "words", "classes"]
"""What is cut over the ranks: outputs of a linear layer, its inputs, rows of an embedding, or
outputs of a head whose loss takes cut logits."""


class _OptionsRecord(StrictRecord):
    wrap: list[str]
    reshard_after_forward: bool
    styles: dict[str, Style] = Field(default_factory=dict[str, Style])


class _InputsRecord(StrictRecord):
    global_batch: int = Field(ge=1)
    cluster: str
    state_factor: float = Field(ge=1, allow_inf_nan=False)
    hardware: str


class _FileRecord(StrictRecord):
    nostall_engine_plan: Literal[1]
    planner: str
    kind: Literal["modelled"]
    predicted_step_s: float = Field(ge=0, allow_inf_nan=False)
    predicted_update_s: float = Field(0.0, ge=0, allow_inf_nan=False)
    predicted_speedup: float = Field(ge=0, allow_inf_nan=False)
    peak_memory_bytes: float = Field(ge=0, allow_inf_nan=False)
    module: str
    engine: TorchEngine
    options: _OptionsRecord
    compile: bool
    capture: Literal[False]
    inputs: _InputsRecord


@dataclass(frozen=True)
class EngineFile:
    """What a run needs of a file."""

    planner: str
    predicted_step_s: float
    module: str
    """``path.py:build`` of the job."""
    samples: int
    """Samples of a step."""
    cluster: Cluster
    engine: TorchEngine
    wrap: tuple[str, ...] = ()
    """Submodules that FSDP2 gathers one after the other; the rest is one group."""
    reshard_after_forward: bool = True
    """Whether FSDP2 frees gathered parameters after the forward pass of their group."""
    is_compiled: bool = False
    """Whether each group, or the whole module, is compiled by ``torch.compile``."""
    styles: Mapping[str, Style] = field(default_factory=dict[str, Style])
    """Layers that tensor parallelism cuts; all else is whole on each rank."""


def engine_document(
    engine: TorchEngine,
    plan: ShardingPlan,
    module: str,
    samples: int,
    state_factor: float,
    wrap: Sequence[str],
    styles: Mapping[str, Style],
) -> dict[str, Any]:
    """Content of a file as JSON values; ``plan`` is that of the engine's rule.

    FSDP2 keeps gathered parameters until the backward pass if they fit into memory all at once.
    """
    graph = plan.prices.graph
    own = [graph.tensors[graph.operators[number].outputs[0]] for number in graph.parameters]
    whole = sum(info.elements * info.itemsize for info in own)
    keeps = plan.memory.peak + whole <= min(plan.prices.mesh.cluster.memory)
    # DDP copies gradients into its buckets, FSDP2 also what it gathers, beside no operator.
    copies = {"ddp": 1, "fsdp2": 2 if keeps else 3, "tp": 0}[engine]
    rates = plan.prices.rates
    without_waits = replace(plan.prices, rates=replace(rates, wait_s=0.0))
    # FSDP2 has two collectives for a block, where the rule has two for a parameter.
    rule_s = timeline(without_waits, plan.assignment).step_s if engine == "fsdp2" else plan.step_s
    step_s = rule_s + copies * 2 * whole / rates.memory
    return {
        "planner": engine,
        "kind": "modelled",
        "predicted_step_s": step_s,
        "predicted_update_s": plan.update_s,
        "predicted_speedup": plan.one_gpu_s / step_s,
        "peak_memory_bytes": plan.memory.peak,
        VERSION_KEY: 1,
        "module": module,
        "engine": engine,
        "options": {
            "wrap": list(wrap) if engine == "fsdp2" else [],
            "reshard_after_forward": not keeps,
            "styles": dict(styles) if engine == "tp" else {},
        },
        "compile": False,
        "capture": False,
        "inputs": {
            "global_batch": samples,
            "cluster": plan.prices.mesh.cluster.text,
            "state_factor": state_factor,
            "hardware": plan.prices.rates.name,
        },
    }


def load_engine_plan(path: Path) -> EngineFile:
    """Read a file; raises :class:`BadPlan` if it cannot be read or is invalid."""
    record = read_record(path, _FileRecord)
    cluster = parse_cluster(record.inputs.cluster, f"the cluster in {path}")
    if record.engine != "tp" and record.inputs.global_batch < len(cluster):
        raise BadPlan(
            f"{path} has {record.inputs.global_batch} samples for {len(cluster)} GPUs; each needs "
            "one; plan with a larger --global-batch"
        )
    if record.engine == "tp" and not record.options.styles:
        raise BadPlan(
            f"{path} is for tp and cuts no layer, so every GPU would do all of the work; name "
            "linear layers in options.styles, as nostall plan --planner tp does"
        )
    return EngineFile(
        record.planner,
        record.predicted_step_s,
        record.module,
        record.inputs.global_batch,
        cluster,
        record.engine,
        tuple(record.options.wrap),
        record.options.reshard_after_forward,
        record.compile,
        record.options.styles,
    )
