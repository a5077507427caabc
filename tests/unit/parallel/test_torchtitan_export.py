"""Export for torchtitan: torch's runtime loads the file, and unsupported plans are rejected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nostall.parallel.errors import BadPlan
from nostall.parallel.plan import Plan, Policy, Stage, Workload
from nostall.parallel.torchtitan_export import (
    export_stages,
    export_torchtitan,
    schedule_csv,
    stages_text,
    torchtitan_settings,
)
from tests.unit.fusion.codegen.interpreter_process import run_interpreted
from tests.unit.parallel.cases import pipeline, profile, servers, straight

ROTATION = Plan(tuple(Stage(s, s + 1, (s % 2,)) for s in range(4)), "interleaved")


@contextmanager
def fake_rank(ranks: int, rank: int) -> Iterator[Any]:
    """One rank of a fake process group, which sends nothing."""
    dist = pytest.importorskip("torch.distributed")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield dist
    finally:
        dist.destroy_process_group()


def runtime(own: list[int], stages: int, micro_batches: int) -> Any:
    """torch's runtime for the stages of a rank, as torchtitan creates it before loading the CSV."""
    import torch
    from torch.distributed.pipelining import PipelineStage, schedules

    stage_objects = [
        PipelineStage(torch.nn.Linear(1, 1), s, stages, torch.device("cpu")) for s in own
    ]
    return schedules._PipelineScheduleRuntime(
        stage_objects, n_microbatches=micro_batches, loss_fn=torch.nn.MSELoss(), scale_grads=False
    )


@pytest.mark.parametrize(
    ("plan", "micro_batches"),
    [
        *((straight([1, 2, 3], p), 5) for p in ("gpipe", "pa", "pb", "list", "zero-bubble")),
        (ROTATION, 4),
    ],
    ids=lambda value: value.policy if isinstance(value, Plan) else str(value),
)
def test_torch_loads_and_simulates_the_file(plan: Plan, micro_batches: int, tmp_path: Path) -> None:
    """Each rank loads its own actions, and torch's simulation of them ends with all sends done."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    stages = len(plan.stages)
    ranks = len({stage.gpus for stage in plan.stages})
    work = Workload(profile(stages, parameters=1.0), servers(1, ranks), micro_batches)
    table, _ = export_torchtitan(work, plan, tmp_path)
    rows = [line.split(",") for line in table.read_text().splitlines()]
    for rank in range(ranks):
        own = list(range(rank, stages, ranks))
        with fake_rank(ranks, rank):
            loaded = runtime(own, stages, micro_batches)
            loaded._load_csv(str(table))
            read = {r: [str(a) for a in row] for r, row in loaded.pipeline_order.items()}
            assert read == dict(enumerate(rows))
            assert {int(cell[0]) for cell in rows[rank]} == set(own)
            lowered = loaded.pipeline_order_with_comms
    # torch's simulation does not support actions of sharded parameters.  It raises if a row would
    # deadlock.
    supported = {
        r: [a for a in row if not str(a).endswith(("UNSHARD", "RESHARD", "REDUCE_GRAD"))]
        for r, row in lowered.items()
    }
    simulated = schedules._simulate_comms_compute(supported, lambda s: s % ranks, stages)
    sends = sum("SEND" in str(action) for row in simulated.values() for action in row if action)
    assert sends == 2 * (stages - 1) * micro_batches


def test_settings_name_the_modules_that_torchtitan_splits() -> None:
    """Layers inside a block, and later calls of a module, are named by the block or module."""
    names = ["embed", "layers.0", "layers.0#2", "layers.1.w", "layers.1.v", "norm.inner"]
    unnamed = profile(6)
    layers = tuple(replace(x, name=n) for x, n in zip(unnamed.layers, names, strict=True))
    work = Workload(replace(unnamed, layers=layers, batch=4), servers(1, 4), 24)
    plan = Plan((Stage(0, 3, (0, 1)), Stage(3, 6, (2, 3))))
    settings = torchtitan_settings(work, plan, "x.csv")
    assert settings["parallelism"]["module_fqns_per_model_part"] == [
        ["embed", "layers.0"],
        ["layers.1", "norm"],
    ]
    size = settings["parallelism"]["pipeline_parallel_microbatch_size"]
    assert settings["training"]["local_batch_size"] // size == work.micro_batches
    inside = Plan((Stage(0, 4, (0, 1)), Stage(4, 6, (2, 3))))
    with pytest.raises(BadPlan, match=r"layers\.1 is in stages 0 and 1"):
        torchtitan_settings(work, inside, "x.csv")


def test_stages_on_one_gpu_share_a_row() -> None:
    rows = schedule_csv(Workload(profile(4), servers(1, 2), 4), ROTATION).splitlines()
    assert len(rows) == 2 and "2F0" in rows[0] and "3F0" in rows[1]


def _one_gpu_stages(*gpus: int, policy: Policy = "list") -> Plan:
    return Plan(tuple(Stage(s, s + 1, (g,)) for s, g in enumerate(gpus)), policy)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan((Stage(0, 1, (0,)), Stage(1, 4, (1, 2)))), "1:2"),
        (Plan((Stage(0, 4, (0, 1, 2)),), "1f1b"), "one stage"),
        (_one_gpu_stages(0, 1, 1, 0), r"\[0, 1, 1, 0\]"),
        (_one_gpu_stages(0, 1, 2, 0), r"\[0, 1, 2, 0\]"),
        (straight([2, 4], "pb", recompute=True), "re-computes"),
        (Plan((Stage(0, 2, (0, 1)), Stage(2, 4, (2, 3)))), "1 over 2 replicas"),
    ],
)
def test_unsupported_plans_are_rejected(plan: Plan, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadPlan, match=message):
        export_torchtitan(pipeline(4, 4), plan, tmp_path)
    assert not list(tmp_path.iterdir())


def _stages(cuts: list[int], policy: Policy, *rows: tuple[int, ...]) -> Plan:
    """Stages that end before the layers ``cuts``, in rotation on rows of GPUs."""
    bounds = zip([0, *cuts], [*cuts, 6], strict=True)
    return Plan(tuple(Stage(a, b, rows[n % len(rows)]) for n, (a, b) in enumerate(bounds)), policy)


NAMES = ("embed", "layers.0", "layers.1", "layers.2", "layers.3", "head")
EXPORTED = {
    "gpipe": _stages([3], "gpipe", (0,), (1,)),
    "1f1b": _stages([2], "1f1b", (0,), (1,)),
    "interleaved": _stages([1, 3, 5], "interleaved", (0,), (1,)),
}


def work_of(samples: int = 8, names: tuple[str, ...] = NAMES) -> Workload:
    unnamed = profile(6)
    layers = tuple(replace(x, name=n) for x, n in zip(unnamed.layers, names, strict=True))
    return Workload(replace(unnamed, layers=layers, batch=2), servers(1, 2), samples, 2)


def test_exported_stages_train_as_one_process_does(tmp_path: Path) -> None:
    """Two processes; the first and last stage also hold a tied weight, which check refuses."""
    pytest.importorskip("torch")
    for name, plan in EXPORTED.items():
        export_stages(work_of(), plan, tmp_path / f"{name}.py")
    refused = run_interpreted("tests.unit.parallel.exported_stages", tmp_path, *EXPORTED)
    assert refused == ["embed.weight is in stages 0 and 3"] * 2


@pytest.mark.parametrize(
    ("plan", "names", "message"),
    [
        (_stages([3], "zero-bubble", (0,), (1,)), NAMES, "order zero-bubble with one"),
        (_stages([1, 3, 5], "1f1b", (0,), (1,)), NAMES, "order 1f1b with several stages"),
        (_stages([3], "1f1b", (1,), (0,)), NAMES, "ascending order"),
        (_stages([3], "1f1b", (0,), (1,)), (*NAMES[:3], "layers.1#2", *NAMES[4:]),
         "begins with layers.1#2, a later call"),
    ],
)  # fmt: skip
def test_plans_that_pytorch_cannot_build_are_rejected(
    plan: Plan, names: tuple[str, ...], message: str
) -> None:
    with pytest.raises(BadPlan, match=message):
        stages_text(work_of(names=names), plan)
