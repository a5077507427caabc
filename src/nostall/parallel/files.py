"""Plan files: a plan with the profile and the cluster it was made for, in one JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from nostall.parallel.cluster import parse_cluster
from nostall.parallel.errors import BadPlan
from nostall.parallel.outcome import Outcome, describe
from nostall.parallel.plan import Plan, Policy, Stage, Workload, check_plan
from nostall.parallel.profile.files import ProfileRecord, from_record, to_record


class _StageRecord(BaseModel):
    first: int
    end: int
    gpus: list[int]


class _Inputs(BaseModel):
    model_config = ConfigDict(extra="forbid")

    global_batch: int
    micro_batch: int | None
    state_factor: float
    weight_gradient_share: float
    cluster: str
    profile: ProfileRecord


class _PlanRecord(BaseModel):
    """What is read back; everything else in the file is derived from it."""

    planner: str
    nostall_plan: Literal[1]
    policy: Policy
    in_flight: list[int] | None
    recompute: bool
    stages: list[_StageRecord]
    module: str | None = None
    inputs: _Inputs


def plan_document(found: Outcome, module: str | None = None) -> dict[str, Any]:
    """The whole file as JSON values: what was predicted, then what it was predicted from.

    ``module`` is the ``path.py:build`` that was profiled for it, if any.
    """
    work, plan = found.work, found.plan
    return {
        **describe(found),
        "nostall_plan": 1,
        "policy": plan.policy,
        "in_flight": list(plan.in_flight) if plan.in_flight is not None else None,
        "recompute": plan.recompute,
        "module": module,
        "inputs": {
            "global_batch": work.global_batch,
            "micro_batch": work.micro_batch,
            "state_factor": work.state_factor,
            "weight_gradient_share": work.weight_gradient_share,
            "cluster": work.cluster.text,
            "profile": to_record(work.profile).model_dump(),
        },
    }


def load_plan(path: Path) -> tuple[Workload, Plan, str]:
    """The workload, the plan and the planner's name of a plan file; raises :class:`BadPlan`."""
    record = _read(path)
    inputs = record.inputs
    work = Workload(
        from_record(inputs.profile),
        parse_cluster(inputs.cluster, f"the cluster in {path}"),
        inputs.global_batch,
        inputs.micro_batch,
        inputs.state_factor,
        inputs.weight_gradient_share,
    )
    plan = Plan(
        tuple(Stage(s.first, s.end, tuple(s.gpus)) for s in record.stages),
        record.policy,
        tuple(record.in_flight) if record.in_flight is not None else None,
        record.recompute,
    )
    check_plan(plan, len(work.profile), len(work.cluster))
    return work, plan, record.planner


def planned_module(path: Path) -> str | None:
    """The ``path.py:build`` that a plan file was made from; None for one made from a profile."""
    return _read(path).module


def _read(path: Path) -> _PlanRecord:
    try:
        return _PlanRecord.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise BadPlan(f"cannot read {path}: {error.strerror}; give a plan file") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadPlan(f"{path} is not JSON: {error}; write it with nostall plan --out") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise BadPlan(
            f"{path}: {field}: {first['msg']}; write the file with nostall plan --out"
        ) from error
