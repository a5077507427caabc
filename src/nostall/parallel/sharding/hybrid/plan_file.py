"""Files of hybrid plans: stages of a pipeline with the strategies of their operators, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from nostall.parallel.cluster import Cluster, parse_cluster
from nostall.parallel.errors import BadPlan
from nostall.parallel.sharding.hybrid.search import HybridStage
from nostall.parallel.sharding.plan_file import (
    PlanFile,
    StrategyRecord,
    StrictRecord,
    read_record,
    read_strategies,
    strategy_records,
)
from nostall.parallel.sharding.planners.sharding import ShardingPlan

VERSION_KEY = "nostall_hybrid_plan"
"""Key of the version, by which a reader recognises these files."""


class _InputsRecord(StrictRecord):
    global_batch: int = Field(ge=1)
    micro_batch: int = Field(ge=1)
    cluster: str
    state_factor: float = Field(ge=1, allow_inf_nan=False)
    hardware: str


class _StageRecord(BaseModel):
    layers: tuple[int, int]
    gpus: int = Field(ge=1)
    seconds: float = Field(ge=0, allow_inf_nan=False)
    fingerprint: str
    strategies: dict[str, list[StrategyRecord]]


class _FileRecord(BaseModel):
    """The fields that are read back; all others are for people."""

    nostall_hybrid_plan: Literal[1]
    planner: str
    predicted_step_s: float = Field(ge=0, allow_inf_nan=False)
    module: str
    inputs: _InputsRecord
    stages: list[_StageRecord] = Field(min_length=1)


@dataclass(frozen=True)
class HybridFile:
    """What a run needs of a file."""

    planner: str
    predicted_step_s: float
    module: str
    """``path.py:build`` of the job."""
    samples: int
    """Samples of a step."""
    micro_batch: int
    """Samples of a micro-batch."""
    cluster: Cluster
    stages: tuple[tuple[HybridStage, PlanFile], ...]

    @property
    def split(self) -> str:
        """GPUs of each stage, as users write them: ``2:1:1``."""
        return ":".join(str(stage.devices) for stage, _ in self.stages)


def hybrid_document(
    planner: str,
    module: str,
    batch: tuple[int, int],
    state_factor: float,
    stages: Sequence[tuple[HybridStage, ShardingPlan]],
    cluster: Cluster,
    step_s: float,
) -> dict[str, Any]:
    """Content of a file as JSON values; ``batch`` is (samples of a step, of a micro-batch)."""
    return {
        "planner": planner,
        "kind": "modelled",
        "predicted_step_s": step_s,
        VERSION_KEY: 1,
        "module": module,
        "inputs": {
            "global_batch": batch[0],
            "micro_batch": batch[1],
            "cluster": cluster.text,
            "state_factor": state_factor,
            "hardware": stages[0][1].prices.rates.name,
        },
        "stages": [
            {
                "layers": [stage.first, stage.end],
                "gpus": stage.devices,
                "seconds": stage.seconds,
                "plan": plan.name,
                "peak_memory_bytes": plan.memory.peak,
                "fingerprint": plan.prices.graph.fingerprint,
                "strategies": strategy_records(plan),
            }
            for stage, plan in stages
        ],
    }


def load_hybrid_plan(path: Path) -> HybridFile:
    """Read a file; raises :class:`BadPlan` if it cannot be read or is invalid."""
    record = read_record(path, _FileRecord)
    inputs, stages = record.inputs, record.stages
    cluster = parse_cluster(inputs.cluster, f"the cluster in {path}")
    ends = [0, *(stage.layers[1] for stage in stages)]
    is_chain = all(s.layers[0] == e < s.layers[1] for s, e in zip(stages, ends, strict=False))
    gpus = sum(stage.gpus for stage in stages)
    if not is_chain or gpus != len(cluster) or inputs.global_batch % inputs.micro_batch:
        raise BadPlan(
            f"{path} has stages of layers {[s.layers for s in stages]} on {gpus} of "
            f"{len(cluster)} GPUs, {inputs.global_batch} samples and micro-batches of "
            f"{inputs.micro_batch}; allowed are stages that follow each other on all GPUs, and a "
            "multiple of the micro-batch; write the file with nostall plan --out"
        )
    return HybridFile(
        record.planner,
        record.predicted_step_s,
        record.module,
        inputs.global_batch,
        inputs.micro_batch,
        cluster,
        tuple(
            (
                HybridStage(*stage.layers, stage.gpus, stage.seconds),
                PlanFile(
                    record.planner, stage.seconds, record.module, inputs.micro_batch,
                    (stage.gpus,), cluster, stage.fingerprint, read_strategies(stage.strategies),
                ),
            )
            for stage in stages
        ),
    )  # fmt: skip
