"""Tests that the tables of code generation have exactly one entry for each scheme."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import pytest

from nostall.fusion.codegen.cost.kernel import COSTS
from nostall.fusion.codegen.emit.emit import EMITTERS, PACKABLE_BODIES
from nostall.fusion.codegen.loops.schedule import ScheduleKind
from nostall.fusion.codegen.tiling.kernel_plan import REGISTER_SCHEMES, Scheme
from nostall.fusion.codegen.tiling.legality import CONSTRAINTS
from nostall.fusion.codegen.tiling.plan_space import CANDIDATES


@pytest.mark.parametrize("table", [CONSTRAINTS, COSTS, EMITTERS], ids=["legal", "cost", "emit"])
def test_tables_have_all_schemes(table: Mapping[Scheme, Any]) -> None:
    assert set(table) == set(get_args(Scheme))


def test_candidates_exist_for_all_kinds_of_schedules() -> None:
    assert set(CANDIDATES) == set(get_args(ScheduleKind))


def test_schemes_in_registers_can_be_packed() -> None:
    assert set(REGISTER_SCHEMES) < set(PACKABLE_BODIES) < set(EMITTERS)
