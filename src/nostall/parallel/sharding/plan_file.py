"""Files of sharding plans: a plan, its modelled cost and the inputs it was made for, as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nostall.core.validation import explain, parse_json
from nostall.parallel.cluster import Cluster, parse_cluster
from nostall.parallel.errors import BadPlan
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh
from nostall.parallel.sharding.graph import Assignment, ShardingGraph, strategy_of
from nostall.parallel.sharding.layer_table import parameter_rows
from nostall.parallel.sharding.planners.sharding import ShardingPlan

VERSION_KEY = "nostall_sharding_plan"
"""Key of the version, by which a reader recognises these files."""
Record = TypeVar("Record", bound=BaseModel)


class StrictRecord(BaseModel):
    """A record that refuses unknown fields."""

    model_config = ConfigDict(extra="forbid")


class StrategyRecord(StrictRecord):
    """Placements of inputs and outputs on one mesh dimension."""

    inputs: list[str]
    outputs: list[str]


class _InputsRecord(StrictRecord):
    global_batch: int = Field(ge=1)
    mesh: list[Annotated[int, Field(ge=1)]] = Field(min_length=1)
    cluster: str
    state_factor: float = Field(ge=1, allow_inf_nan=False)
    hardware: str


class _FileRecord(BaseModel):
    """The fields that are read back; all others are for people."""

    nostall_sharding_plan: Literal[1]
    planner: str
    predicted_step_s: float = Field(ge=0, allow_inf_nan=False)
    module: str
    fingerprint: str
    inputs: _InputsRecord
    strategies: dict[str, list[StrategyRecord]]


@dataclass(frozen=True)
class PlanFile:
    """What a run needs of a plan file."""

    planner: str
    predicted_step_s: float
    module: str
    """``path.py:build`` of the job."""
    samples: int
    """Samples of a step."""
    mesh: tuple[int, ...]
    cluster: Cluster
    fingerprint: str
    """That of the graph that was planned."""
    strategies: dict[str, list[tuple[tuple[str, ...], tuple[str, ...]]]]
    """By operator, the placements of inputs and outputs on each mesh dimension."""

    def assignment(self, graph: ShardingGraph, planned: ShardingGraph | None = None) -> Assignment:
        """The numbers of the strategies in a graph; raises :class:`BadPlan` for another one.

        ``graph`` may be that of a batch of another size if ``planned`` is that of the plan.
        """
        if (planned or graph).fingerprint != self.fingerprint or (
            planned is not None and _operations(graph) != _operations(planned)
        ):
            raise BadPlan(
                f"the plan was made for another training step than that of {self.module}: the "
                "module, its batch or the version of torch is another one; plan again"
            )
        numbers = []
        for mesh_dim in range(len(self.mesh)):
            own = []
            for operator in graph.operators:
                known = [(s.inputs, s.outputs) for s in operator.strategies[mesh_dim]]
                wanted = self.strategies.get(operator.name, [])
                if mesh_dim >= len(wanted) or wanted[mesh_dim] not in known:
                    if planned is not None:
                        raise BadPlan(
                            f"a batch of another size than the plan's {self.samples} samples does "
                            f"not divide as the plan cuts {operator.name}; leave the short batch "
                            "out (drop_last=True), or give a multiple of the processes"
                        )
                    raise BadPlan(
                        f"the plan has no strategy for {operator.name} on mesh dimension "
                        f"{mesh_dim} that its operator allows; plan again"
                    )
                own.append(known.index(wanted[mesh_dim]))
            numbers.append(tuple(own))
        return tuple(numbers)


def _operations(graph: ShardingGraph) -> list[tuple[str, str, str]]:
    """The operators of a graph without the shapes of their tensors."""
    return [(o.name, o.kind, o.target) for o in graph.operators]


def plan_document(
    plan: ShardingPlan,
    others: Sequence[ShardingPlan],
    module: str,
    samples: int,
    state_factor: float,
) -> dict[str, Any]:
    """Content of a plan file as JSON values; ``others`` are the runners-up."""
    graph, cluster = plan.prices.graph, plan.prices.mesh.cluster
    return {
        "planner": plan.name,
        "predicted_step_s": plan.step_s,
        "predicted_update_s": plan.update_s,
        "kind": "modelled",
        "predicted_speedup": plan.one_gpu_s / plan.step_s,
        "operators_s": plan.times.operators_s,
        "collectives_s": plan.times.collectives_s,
        "exposed_s": plan.times.exposed_s,
        "bound_s": plan.bound_s or None,
        "mesh": list(graph.mesh),
        "cluster_name": cluster.name,
        "peak_memory_bytes": plan.memory.peak,
        "state_bytes": plan.memory.state,
        "memory_bytes": min(cluster.memory),
        "is_proven": plan.is_proven,
        "collectives": collective_rows(plan),
        "parameters": _parameter_records(plan),
        "runners_up": [_runner_up_record(other, min(cluster.memory)) for other in others],
        "operators_without_rule": dict(Counter(graph.without_rule)),
        VERSION_KEY: 1,
        "module": module,
        "fingerprint": graph.fingerprint,
        "inputs": {
            "global_batch": samples,
            "mesh": list(graph.mesh),
            "cluster": cluster.text,
            "state_factor": state_factor,
            "hardware": plan.prices.rates.name,
        },
        "strategies": strategy_records(plan),
    }


def strategy_records(plan: ShardingPlan) -> dict[str, list[dict[str, list[str]]]]:
    """By operator, the placements of inputs and outputs on each mesh dimension."""
    graph = plan.prices.graph
    return {
        operator.name: [
            {"inputs": list(s.inputs), "outputs": list(s.outputs)}
            for s in strategy_of(graph, plan.assignment, number)
        ]
        for number, operator in enumerate(graph.operators)
    }


def read_strategies(
    records: Mapping[str, Sequence[StrategyRecord]],
) -> dict[str, list[tuple[tuple[str, ...], tuple[str, ...]]]]:
    """What :func:`strategy_records` wrote."""
    return {
        name: [(tuple(s.inputs), tuple(s.outputs)) for s in own] for name, own in records.items()
    }


def _parameter_records(plan: ShardingPlan) -> list[dict[str, Any]]:
    return [
        {
            "name": row.name,
            "count": row.count,
            "shape": list(row.shape),
            "placement": list(row.placement),
            "read": list(row.read),
            "result": list(row.result),
            "local_bytes": row.local_bytes,
        }
        for row in parameter_rows(plan)
    ]


def _runner_up_record(plan: ShardingPlan, memory: float) -> dict[str, Any]:
    return {
        "planner": plan.name,
        "mesh": list(plan.prices.graph.mesh),
        "predicted_step_s": plan.step_s,
        "predicted_update_s": plan.update_s,
        "peak_memory_bytes": plan.memory.peak,
        "fits": plan.fits(memory),
    }


def collective_rows(plan: ShardingPlan) -> list[dict[str, Any]]:
    """Calls, bytes and seconds of the collectives, by kind and mesh dimension; slowest first."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for priced in plan.times.calls:
        key = (priced.step.kind, priced.step.mesh_dim)
        row = rows.setdefault(
            key, {"kind": key[0], "mesh_dim": key[1], "calls": 0, "bytes": 0.0, "seconds": 0.0}
        )
        row["calls"] += 1
        row["bytes"] += priced.size
        row["seconds"] += priced.seconds
    return sorted(rows.values(), key=lambda row: -float(row["seconds"]))


def read_record(path: Path, model: type[Record]) -> Record:
    """The validated content of a plan file; raises :class:`BadPlan` if it is unreadable."""
    try:
        return model.model_validate(parse_json(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise BadPlan(
            f"cannot read {path}: {error.strerror}; give the path of a plan file"
        ) from error
    except ValidationError as error:
        raise BadPlan(
            f"{path}: {explain(error, model)}; write the file with nostall plan --out"
        ) from error
    except ValueError as error:
        raise BadPlan(f"{path} is not JSON: {error}; write it with nostall plan --out") from error


def load_sharding_plan(path: Path) -> PlanFile:
    """Read a plan file; raises :class:`BadPlan` if it cannot be read or is invalid."""
    record = read_record(path, _FileRecord)
    cluster = parse_cluster(record.inputs.cluster, f"the cluster in {path}")
    ClusterMesh(cluster, tuple(record.inputs.mesh))  # raises BadPlan if they do not match
    return PlanFile(
        record.planner,
        record.predicted_step_s,
        record.module,
        record.inputs.global_batch,
        tuple(record.inputs.mesh),
        cluster,
        record.fingerprint,
        read_strategies(record.strategies),
    )
