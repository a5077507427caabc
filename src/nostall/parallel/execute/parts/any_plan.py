"""Plan files of any kind, told apart by the keys of their versions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nostall.core.validation import parse_json
from nostall.parallel.plan import Plan, Workload
from nostall.parallel.plan_file import load_plan
from nostall.parallel.sharding import engine_file, plan_file
from nostall.parallel.sharding.engine_file import EngineFile
from nostall.parallel.sharding.hybrid import plan_file as hybrid_file
from nostall.parallel.sharding.hybrid.plan_file import HybridFile
from nostall.parallel.sharding.plan_file import PlanFile

AnyPlan = PlanFile | HybridFile | EngineFile | tuple[Workload, Plan, str]
"""What the readers of plan files return; the last one is a pipeline plan."""
_READERS: dict[str, Callable[[Path], AnyPlan]] = {
    plan_file.VERSION_KEY: plan_file.load_sharding_plan,
    hybrid_file.VERSION_KEY: hybrid_file.load_hybrid_plan,
    engine_file.VERSION_KEY: engine_file.load_engine_plan,
}


def load_any_plan(path: Path) -> AnyPlan:
    """Read a plan file of any kind; raises :class:`BadPlan` if it is none, or invalid."""
    try:
        document = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return load_plan(path)  # which says why
    keys = document if isinstance(document, dict) else ()
    reader = next((own for key, own in _READERS.items() if key in keys), load_plan)
    return reader(path)
