"""Winners of the search for plans, one file each below ``NOSTALL_HOME``.

A winner holds for one GPU, shape, dtype, kind of batch and set of versions; for another one the
rules of :mod:`nostall.serving.attention.rules` hold.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

import nostall
from nostall.core.launch import StrictModel
from nostall.serving.attention.config import AttentionPlan, AttentionShape
from nostall.serving.attention.rules import BatchKind, Kind, plan_for
from nostall.serving.attention.space import plan_of
from nostall.serving.errors import BadPlan
from nostall.store.folder import home
from nostall.store.result_files import write_result_file


class PlanKey(StrictModel):
    """What a winner holds for."""

    gpu: str
    """Name of the GPU, as PyTorch gives it."""
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    window: int
    has_soft_cap: bool
    has_trees: bool
    has_prefixes: bool = False
    dtype: str
    kind: Kind
    versions: dict[str, str]

    @staticmethod
    def of(shape: AttentionShape, dtype: str, kind: Kind, gpu: str) -> PlanKey:
        """The key with the versions of this process: they decide the kernel's code."""
        import torch
        import triton

        return PlanKey(
            gpu=gpu,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            page_size=shape.page_size,
            window=shape.window,
            has_soft_cap=shape.soft_cap > 0,
            has_trees=shape.has_trees,
            has_prefixes=shape.has_prefixes,
            dtype=dtype,
            kind=kind,
            versions={
                "nostall": nostall.__version__,
                "torch": torch.__version__,
                "triton": triton.__version__,
            },
        )

    def path(self, folder: Path) -> Path:
        """The file of this key's winner."""
        text = json.dumps(self.model_dump(), sort_keys=True)
        return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


class PlanRecord(StrictModel):
    """A winner, and the comparison that confirmed it."""

    schema_version: Literal[1] = 1
    key: PlanKey
    plan: dict[str, Any]
    batch: str
    """Name of the batch that was measured."""
    ratio: float
    """Time of the rule's plan / time of the winner, in the second confirmation."""
    low: float
    """Lower end of the ratio's 95 % interval."""
    high: float
    samples: tuple[tuple[float, ...], ...]
    """Seconds of the rule's plan, the winner, and the rule's plan again (the null)."""
    evaluations: int


def plans_folder() -> Path:
    """The folder of all winners."""
    return home() / "serving" / "plans"


def save_plan(record: PlanRecord, folder: Path | None = None) -> Path:
    """Write a winner; returns its file."""
    path = record.key.path(folder or plans_folder())
    write_result_file(path, record.model_dump_json(indent=1).encode())
    return path


def find_plan(key: PlanKey, folder: Path | None = None) -> AttentionPlan | None:
    """The stored winner of a key, or None. Raises :class:`BadPlan` if its file is damaged."""
    path = key.path(folder or plans_folder())
    try:
        record = PlanRecord.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        reason = str(error).splitlines()[0]
        raise BadPlan(
            f"stored plan {path}: {reason}; remove the file, or search again with `nostall "
            "serving search`"
        ) from error
    if record.key != key:
        raise BadPlan(f"stored plan {path} is for another key; remove the file")
    return plan_of(record.plan)


def plan_in_force(
    shape: AttentionShape, dtype: str, batch: BatchKind, gpu: str, has_gluon: bool
) -> AttentionPlan:
    """The plan that a program on a GPU uses for a kind of batch: the stored winner, or the rule's.

    Errors are those of :func:`find_plan`.
    """
    key = PlanKey.of(shape, dtype, batch.kind(shape.group), gpu)
    return find_plan(key) or plan_for(shape, batch, has_gluon=has_gluon)
