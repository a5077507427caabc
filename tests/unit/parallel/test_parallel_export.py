"""Export for torchtitan: rows that torch's runtime reads back, and what has no words there."""

from __future__ import annotations

import pytest
from tests.unit.parallel.cases import profile, servers, straight

from nostall.parallel.errors import BadPlan
from nostall.parallel.export import schedule_csv, torchtitan_settings
from nostall.parallel.plan import Plan, Stage, Workload


def test_torch_lowers_the_rows_of_every_policy() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for policy in ("gpipe", "pb", "list", "zero-bubble"):
        work = Workload(profile(3, parameters=1.0), servers(1, 3), 5)
        rows = schedule_csv(work, straight([1, 2, 3], policy)).splitlines()
        actions = {
            rank: [schedules._Action.from_str(cell) for cell in row.split(",")]
            for rank, row in enumerate(rows)
        }
        assert all(str(a) == c for r, row in enumerate(rows)
                   for a, c in zip(actions[r], row.split(","), strict=True))  # fmt: skip
        lowered = schedules._add_send_recv(actions, stage_to_rank=lambda s: s, num_stages=3)
        sends = sum("SEND" in str(action) for row in lowered.values() for action in row)
        assert sends == 2 * 2 * 5  # two boundaries, both ways, five micro-batches


def test_stages_of_one_gpu_share_a_row() -> None:
    dealt = Plan(tuple(Stage(s, s + 1, (s % 2,)) for s in range(4)), "interleaved")
    work = Workload(profile(4), servers(1, 2), 4)
    rows = schedule_csv(work, dealt).splitlines()
    assert len(rows) == 2 and "2F0" in rows[0] and "3F0" in rows[1]
    found = torchtitan_settings(work, dealt, "x.csv")
    assert found["module_fqns_per_model_part"] == [["l0"], ["l1"], ["l2"], ["l3"]]


def test_what_torchtitan_cannot_say_is_refused() -> None:
    work = Workload(profile(3), servers(1, 3), 4)
    with pytest.raises(BadPlan, match="1:2"):
        schedule_csv(work, Plan((Stage(0, 1, (0,)), Stage(1, 3, (1, 2)))))
    with pytest.raises(BadPlan, match="one stage"):
        schedule_csv(work, Plan((Stage(0, 3, (0, 1, 2)),), "1f1b"))
