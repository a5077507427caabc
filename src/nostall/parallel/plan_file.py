"""Plan files: a plan with its evaluation and the profile and cluster it was made for, as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from nostall.core.validation import first_problem, parse_json
from nostall.parallel.cluster import parse_cluster
from nostall.parallel.errors import BadPlan
from nostall.parallel.evaluation import PlanEvaluation, evaluation_document
from nostall.parallel.plan import Plan, Policy, Stage, Workload, check_plan
from nostall.parallel.profile.profile_file import ProfileRecord, from_record, to_record

_OTHER_KINDS = {
    "nostall_sharding_plan": "a sharding",
    "nostall_hybrid_plan": "a hybrid",
    "nostall_engine_plan": "an engine's",
}
"""Version keys of plan files without the stages of a pipeline."""


class _StageRecord(BaseModel):
    first: int
    end: int
    gpus: list[int]


class _WorkloadRecord(BaseModel):
    model_config = ConfigDict(extra="forbid")

    global_batch: int
    micro_batch: int | None
    state_factor: float
    weight_gradient_share: float
    fractions: bool = False
    cluster: str
    profile: ProfileRecord


class _PlanRecord(BaseModel):
    """The part of a plan file that is read back; the evaluation is computed again from it."""

    planner: str
    nostall_plan: Literal[1]
    policy: Policy
    in_flight: list[int] | None
    recompute: bool
    stages: list[_StageRecord]
    module: str | None = None
    inputs: _WorkloadRecord


def plan_document(evaluation: PlanEvaluation, module: str | None = None) -> dict[str, Any]:
    """Content of a plan file as JSON values: the evaluation, then the plan and its workload.

    ``module`` is the ``path.py:build`` whose profile was measured; None for a profile file.
    """
    workload, plan = evaluation.workload, evaluation.plan
    return {
        **evaluation_document(evaluation),
        "nostall_plan": 1,
        "policy": plan.policy,
        "in_flight": list(plan.in_flight) if plan.in_flight is not None else None,
        "recompute": plan.recompute,
        "module": module,
        "inputs": {
            "global_batch": workload.global_batch,
            "micro_batch": workload.micro_batch,
            "state_factor": workload.state_factor,
            "weight_gradient_share": workload.weight_gradient_share,
            "fractions": workload.fractions,
            "cluster": workload.cluster.text,
            "profile": to_record(workload.profile).model_dump(),
        },
    }


def load_plan(path: Path) -> tuple[Workload, Plan, str]:
    """Read the workload, the plan and the planner's name from a plan file.

    Raises :class:`BadPlan` if the file cannot be read or is invalid, and the errors of the profile
    and cluster readers.
    """
    record = _read(path)
    inputs = record.inputs
    workload = Workload(
        from_record(inputs.profile),
        parse_cluster(inputs.cluster, f"the cluster in {path}"),
        inputs.global_batch,
        inputs.micro_batch,
        inputs.state_factor,
        inputs.weight_gradient_share,
        inputs.fractions,
    )
    plan = Plan(
        tuple(Stage(s.first, s.end, tuple(s.gpus)) for s in record.stages),
        record.policy,
        tuple(record.in_flight) if record.in_flight is not None else None,
        record.recompute,
    )
    check_plan(plan, len(workload.profile), len(workload.cluster))
    return workload, plan, record.planner


def load_planned_module(path: Path) -> str | None:
    """Read the ``path.py:build`` that a plan was made from; None if it was a profile file."""
    return _read(path).module


def _read(path: Path) -> _PlanRecord:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        keys = content if isinstance(content, dict) else {}
        if kind := next((text for key, text in _OTHER_KINDS.items() if key in keys), ""):
            raise BadPlan(
                f"{path} is {kind} plan, and this command needs a pipeline plan; run it with "
                "nostall launch"
            )
        return _PlanRecord.model_validate(content)
    except OSError as error:
        raise BadPlan(
            f"cannot read {path}: {error.strerror}; give the path of a plan file"
        ) from error
    except ValidationError as error:
        raise BadPlan(
            f"{path}: {first_problem(error)}; write the file with nostall plan --out"
        ) from error
    except ValueError as error:
        raise BadPlan(f"{path} is not JSON: {error}; write it with nostall plan --out") from error
