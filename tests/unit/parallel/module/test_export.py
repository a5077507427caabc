"""Export for torchtitan: torch's own runtime loads the file, and what has no words is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nostall.parallel.errors import BadPlan
from nostall.parallel.export import export_torchtitan, schedule_csv, torchtitan_settings
from nostall.parallel.plan import Plan, Policy, Stage, Workload
from tests.unit.parallel.cases import pipeline, profile, servers, straight

DEALT = Plan(tuple(Stage(s, s + 1, (s % 2,)) for s in range(4)), "interleaved")


@contextmanager
def rank_of(ranks: int, rank: int) -> Iterator[Any]:
    """One rank of a process group that sends nothing."""
    dist = pytest.importorskip("torch.distributed")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield dist
    finally:
        dist.destroy_process_group()


def runtime(own: list[int], stages: int, micro_batches: int) -> Any:
    """What torchtitan makes of the stages of one rank before it loads the CSV."""
    import torch
    from torch.distributed.pipelining import PipelineStage, schedules

    made = [PipelineStage(torch.nn.Linear(1, 1), s, stages, torch.device("cpu")) for s in own]
    return schedules._PipelineScheduleRuntime(
        made, n_microbatches=micro_batches, loss_fn=torch.nn.MSELoss(), scale_grads=False
    )


@pytest.mark.parametrize(
    ("plan", "micro_batches"),
    [
        *((straight([1, 2, 3], p), 5) for p in ("gpipe", "pa", "pb", "list", "zero-bubble")),
        (DEALT, 4),
    ],
    ids=lambda value: value.policy if isinstance(value, Plan) else str(value),
)
def test_torch_loads_the_file_and_plays_it_through(
    plan: Plan, micro_batches: int, tmp_path: Path
) -> None:
    """Every action comes back on its rank, and torch's simulation of them ends, with all sends."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    stages = len(plan.stages)
    ranks = len({stage.gpus for stage in plan.stages})
    work = Workload(profile(stages, parameters=1.0), servers(1, ranks), micro_batches)
    table, _ = export_torchtitan(work, plan, tmp_path)
    rows = [line.split(",") for line in table.read_text().splitlines()]
    for rank in range(ranks):
        own = list(range(rank, stages, ranks))
        with rank_of(ranks, rank):
            loaded = runtime(own, stages, micro_batches)
            loaded._load_csv(str(table))
            read = {r: [str(a) for a in some] for r, some in loaded.pipeline_order.items()}
            assert read == dict(enumerate(rows))
            assert {int(cell[0]) for cell in rows[rank]} == set(own)
            lowered = loaded.pipeline_order_with_comms
    # torch's simulation knows no actions of sharded parameters; it raises where a row would wait
    # for ever.
    kept = {
        r: [a for a in row if not str(a).endswith(("UNSHARD", "RESHARD", "REDUCE_GRAD"))]
        for r, row in lowered.items()
    }
    played = schedules._simulate_comms_compute(kept, lambda s: s % ranks, stages)
    sends = sum("SEND" in str(action) for row in played.values() for action in row if action)
    assert sends == 2 * (stages - 1) * micro_batches


def test_settings_name_what_torchtitan_splits() -> None:
    """``layers.1.w`` and a second call of a module belong to the parts that torchtitan knows."""
    names = ["embed", "layers.0", "layers.0#2", "layers.1.w", "layers.1.v", "norm.inner"]
    made = profile(6)
    layers = tuple(replace(x, name=n) for x, n in zip(made.layers, names, strict=True))
    work = Workload(replace(made, layers=layers, batch=4), servers(1, 4), 24)
    plan = Plan((Stage(0, 3, (0, 1)), Stage(3, 6, (2, 3))))
    found = torchtitan_settings(work, plan, "x.csv")
    assert found["parallelism"]["module_fqns_per_model_part"] == [
        ["embed", "layers.0"],
        ["layers.1", "norm"],
    ]
    size = found["parallelism"]["pipeline_parallel_microbatch_size"]
    assert found["training"]["local_batch_size"] // size == work.micro_batches
    inside = Plan((Stage(0, 4, (0, 1)), Stage(4, 6, (2, 3))))
    with pytest.raises(BadPlan, match=r"layers\.1 is in stages 0 and 1"):
        torchtitan_settings(work, inside, "x.csv")


def test_stages_of_one_gpu_share_a_row() -> None:
    rows = schedule_csv(Workload(profile(4), servers(1, 2), 4), DEALT).splitlines()
    assert len(rows) == 2 and "2F0" in rows[0] and "3F0" in rows[1]


def _on(*gpus: int, policy: Policy = "list") -> Plan:
    return Plan(tuple(Stage(s, s + 1, (g,)) for s, g in enumerate(gpus)), policy)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan((Stage(0, 1, (0,)), Stage(1, 4, (1, 2)))), "1:2"),
        (Plan((Stage(0, 4, (0, 1, 2)),), "1f1b"), "one stage"),
        (_on(0, 1, 1, 0), r"\[0, 1, 1, 0\]"),
        (_on(0, 1, 2, 0), r"\[0, 1, 2, 0\]"),
        (straight([2, 4], "pb", recompute=True), "re-computes"),
        (Plan((Stage(0, 2, (0, 1)), Stage(2, 4, (2, 3)))), "1 over 2 replicas"),
    ],
)
def test_what_torchtitan_cannot_say_is_refused(plan: Plan, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadPlan, match=said):
        export_torchtitan(pipeline(4, 4), plan, tmp_path)
    assert not list(tmp_path.iterdir())
