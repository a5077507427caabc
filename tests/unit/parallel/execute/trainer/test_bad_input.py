"""What a trainer refuses with one line, in one process."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training by plans needs the extra nostall[torch]")
pytest.importorskip("scipy", reason="shardings need the extra nostall[sharding]")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy  # noqa: E402

import nostall.parallel  # noqa: E402
from nostall.core.errors import BadInput  # noqa: E402
from nostall.parallel.execute.parts import hybrid_part  # noqa: E402
from nostall.parallel.execute.trainer import checkpoints  # noqa: E402
from nostall.parallel.execute.trainer.sampler import OwnSampler  # noqa: E402
from nostall.parallel.module import Job  # noqa: E402
from tests.unit.parallel.execute.trainer.models import (  # noqa: E402
    BATCH,
    MICRO_BATCH,
    Block,
    chain,
    engine,
    hybrid,
    language,
    pipeline,
    sharding,
)
from tests.unit.parallel.execute.trainer.ranks import adamw  # noqa: E402

build = nostall.parallel.build


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def one_gpu() -> Any:
    return pipeline(chain(), (0,))


def refuse(text: str, *given: Any, **named: Any) -> None:
    with pytest.raises(BadInput, match=text) as caught:
        build(*given, **named)
    assert "\n" not in str(caught.value)


def test_a_program_without_a_process_group_is_told_how_to_start(one_gpu: Any) -> None:
    refuse("torchrun --nproc-per-node", one_gpu, chain())


def test_the_processes_must_be_those_of_the_plan(one_process: None) -> None:
    refuse(
        "1 processes run and the plan's cluster has 2 GPUs", pipeline(chain(), (0,), (1,)), chain()
    )
    mesh = DeviceMesh("cpu", torch.zeros(1, 1, dtype=torch.int))
    wrong = sharding(chain(), "fsdp", 1)
    refuse(r"shape \(1, 1\).*allowed are \(1,\)", wrong, chain(), device_mesh=mesh)


def test_a_plan_of_another_module_is_refused(one_process: None, one_gpu: Any) -> None:
    refuse("the first difference is layer 0", one_gpu, language())
    refuse("another training step", sharding(chain(), "fsdp", 1), language())


class Frozen(nn.Module):
    """A layer of another type, trained or not, before one of float32."""

    def __init__(self, *, is_trained: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4).to(torch.bfloat16).requires_grad_(is_trained)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x.to(torch.bfloat16)).float())


def test_fsdp2_needs_one_type_of_what_is_trained_only(one_process: None) -> None:
    def job(*, is_trained: bool) -> Job:
        x = torch.randn(BATCH, 4)
        return Job(Frozen(is_trained=is_trained), (x,), torch.randn(BATCH, 4), nn.MSELoss())

    frozen, trained = job(is_trained=False), job(is_trained=True)
    trainer = build(engine(frozen, "fsdp2", 1), frozen)
    trainer.forward_backward((*frozen.inputs, frozen.targets))
    trainer.close()
    refuse("one type in each group of trained", engine(trained, "fsdp2", 1), trained)


class Branches(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class Draws(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + random.random())


class Counts(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "count"):
            self.register_buffer("count", torch.zeros(()))
        self.count += 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "text"),
    [(Branches, "no branches on values of tensors"), (Draws, "Python's random"), (Counts, "count")],
)
def test_modules_that_no_trace_repeats_are_refused_by_name(
    one_process: None, one_gpu: Any, kind: Any, text: str
) -> None:
    job = chain()
    refuse(text, one_gpu, replace(job, module=kind(*job.module)))


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return super().forward(x) * scale


def test_batches_that_the_traced_step_does_not_fit_are_refused(one_process: None) -> None:
    inputs, targets = (torch.randn(BATCH, 8), 2.0), torch.randint(0, 4, (BATCH,))
    job = Job(Scaled(8, 4), inputs, targets, nn.functional.cross_entropy)
    for plan in (pipeline(job, (0,)), sharding(job, "fsdp", 1)):
        trainer = build(plan, job, adamw)
        trainer.step((inputs, targets))
        with pytest.raises(BadInput, match=r"value 1 of \(inputs, targets\) is 3.0 and in the job"):
            trainer.step(((inputs[0], 3.0), targets))
        with pytest.raises(BadInput, match=r"a tensor of samples of shape \(9,\)"):
            trainer.step(((torch.randn(BATCH, 9), 2.0), targets))
    ignored = torch.where(torch.arange(BATCH) == 1, -100, targets)
    trainer = build(pipeline(job, (0,)), job, adamw)
    with pytest.raises(BadInput, match="targets with the value -100"):
        trainer.step((inputs, ignored))


def test_batches_that_are_not_contiguous(one_process: None) -> None:
    """The kernel of GroupNorm needs contiguous tensors, and the trace of one has no copy."""
    module = nn.Sequential(nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(12, 3))
    job = Job(module, (torch.randn(BATCH, 4, 3),), torch.randn(BATCH, 3), nn.functional.mse_loss)
    trainer = build(sharding(job, "fsdp", 1), job, adamw)
    images = torch.stack([job.inputs[0], job.inputs[0]], -1)[..., 0]
    loss = trainer.forward_backward(((images,), job.targets))
    expected = job.run(job.inputs, job.targets).detach()
    assert float(loss) == pytest.approx(float(expected))


def test_ignored_labels_are_right_where_a_loss_is_not_cut(one_process: None) -> None:
    targets = torch.randint(0, 4, (BATCH,))
    ignored = torch.where(torch.arange(BATCH) == 1, -100, targets)
    job = Job(nn.Linear(8, 4), (torch.randn(BATCH, 8),), targets, nn.functional.cross_entropy)
    one = job.inputs[0][:MICRO_BATCH], ignored[:MICRO_BATCH]
    expected = float(nn.functional.cross_entropy(job.module(one[0]), one[1]).detach())
    for plan in (pipeline(job, (0,)), hybrid(job, 1)):
        trainer = build(plan, job)
        loss = trainer.forward_backward(one, samples=MICRO_BATCH)
        assert float(loss) == pytest.approx(expected, rel=1e-5)
        with pytest.raises(BadInput, match="targets with the value -100"):
            trainer.forward_backward((*job.inputs, ignored))
        trainer.close()


def test_optimisers_that_are_none_or_of_other_parameters(one_process: None, one_gpu: Any) -> None:
    refuse("returned a int", one_gpu, chain(), lambda parameters: 3)
    job = chain()
    others = copy.deepcopy(job.module)
    refuse("other parameters", one_gpu, job, lambda _: torch.optim.SGD(others.parameters()))


def test_a_type_in_which_gradients_cannot_be_summed(one_process: None, one_gpu: Any) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float16)
    refuse("reduce_dtype are torch.bfloat16 and torch.float32", one_gpu, chain(), precision=policy)


def test_batches_that_do_not_fit(one_process: None, one_gpu: Any) -> None:
    trainer = build(one_gpu, chain(), adamw)
    inputs, targets = torch.zeros(BATCH, 8), torch.zeros(BATCH, 4)
    assert trainer.own_samples() == list(range(BATCH))
    for batch, text in (
        ((inputs[:3], targets[:3]), f"got a batch of 3 samples and reads {BATCH}"),
        ((inputs, targets, targets), "allowed is a pair"),
        (((inputs, inputs), targets), "has 3 values and the example batch has 2"),
    ):
        with pytest.raises(BadInput, match=text):
            trainer.forward_backward(batch)
    loss = trainer.forward_backward((inputs[:3], targets[:3]), samples=3)
    assert loss.shape == () and torch.isfinite(loss)


def test_named_inputs_may_come_in_any_order(one_process: None) -> None:
    job = Job(Named(), {"a": torch.ones(4, 2), "b": torch.ones(4, 2)}, torch.ones(4), mean_of)
    trainer = build(pipeline(job, (0,)), job, adamw)
    values = {"b": torch.zeros(BATCH, 2), "a": torch.ones(BATCH, 2)}
    assert float(trainer.forward_backward((values, torch.ones(BATCH)))) == pytest.approx(2.0)
    with pytest.raises(BadInput, match=r"the names \['a'\]; allowed are.*\['a', 'b'\]"):
        trainer.forward_backward(({"a": values["a"]}, torch.ones(BATCH)))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.unseen = nn.Linear(2, 2)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            b = self.unseen(b) * 0
        return (a * 2 - b) * self.weight


def mean_of(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return output.mean() * targets.mean()


def test_what_is_read_without_gradients_is_not_trained(one_process: None) -> None:
    job = Job(Named(), {"a": torch.ones(4, 2), "b": torch.ones(4, 2)}, torch.ones(4), mean_of)
    trainer = build(pipeline(job, (0,)), job, adamw)
    assert len(list(trainer.parameters())) == 3
    assert trainer.optimizer.param_groups[0]["params"] == [job.module.weight]


@pytest.mark.parametrize("kind", ["pipeline", "sharding"])
def test_parameters_that_are_frozen_or_thawed_or_not_optimised(
    one_process: None, kind: str
) -> None:
    job = chain()
    plan = pipeline(job, (0,)) if kind == "pipeline" else sharding(job, "fsdp", 1)
    trainer = build(plan, job, lambda own: torch.optim.SGD(list(own)[:1], lr=0.1))
    batch = job.example_batch(BATCH)
    named = dict(trainer.named_parameters())
    trainer.forward_backward(batch)
    trainer.zero_grad()
    assert all(p.grad is None for p in named.values())
    named["0.weight"].requires_grad_(False)
    trainer.forward_backward(batch)
    assert named["0.weight"].grad is None and named["4.weight"].grad is not None
    named["1.frozen"].requires_grad_(True)
    with pytest.raises(BadInput, match=r"1\.frozen was frozen when the trainer was built"):
        trainer.forward_backward(batch)


def test_checkpoints_of_other_models_and_no_checkpoints(
    one_process: None, one_gpu: Any, tmp_path: Path
) -> None:
    trainer = build(one_gpu, chain(), adamw)
    assert trainer.load(tmp_path) is None and trainer.load(tmp_path / "nothing") is None
    saved = trainer.save(tmp_path)
    assert nostall.parallel.latest_checkpoint(tmp_path) == saved == tmp_path / "step-00000000"
    (tmp_path / "step-00000009").mkdir()  # a save that did not end
    assert nostall.parallel.latest_checkpoint(tmp_path) == saved
    scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1)
    with pytest.raises(BadInput, match="has no scheduler; it was saved without it"):
        trainer.load(tmp_path, scheduler=scheduler)
    with pytest.raises(BadInput, match="model is part of each checkpoint"):
        trainer.save(tmp_path, model=scheduler)
    other = build(pipeline(language(), (0,)), language(), adamw)
    with pytest.raises(BadInput, match=r"of another model: it has no .*, which this one has"):
        other.load(saved)
    wide = chain()
    wide.module[4] = nn.Linear(8, 5)
    wide = replace(wide, targets=torch.randn(4, 5))
    with pytest.raises(
        BadInput, match=r"4\.weight has the shape \(4, 8\), and in this one \(5, 8\)"
    ):
        build(pipeline(wide, (0,)), wide, adamw).load(saved)
    (saved / ".metadata").write_bytes(b"damaged")
    with pytest.raises(BadInput, match="is damaged"):
        trainer.load(saved)


def test_a_checkpoint_before_the_first_step_has_no_state_of_the_optimiser(
    one_process: None, one_gpu: Any, tmp_path: Path
) -> None:
    """One that a step of rate 0 leaves has a rate of 0 in it, for example."""
    build(one_gpu, chain(), lambda own: torch.optim.ASGD(own)).save(tmp_path)
    trainer = build(one_gpu, chain(), lambda own: torch.optim.ASGD(own))
    assert trainer.load(tmp_path) is not None and not trainer.optimizer.state


def test_entries_that_differ_between_ranks_are_not_saved(
    one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [{"ema": {"0": torch.ones(2), "at": 3}}, {"ema": {"0": torch.ones(2)}, "rank 1": True}]
    gathered: list[Any] = []

    def gather(found: list[Any], mine: Any) -> None:
        gathered.append(mine)
        found[:] = gathered

    monkeypatch.setattr(checkpoints.dist, "all_gather_object", gather)
    for state in own:
        checkpoints.check_same(state)
    with pytest.raises(
        BadInput, match=r"\['ema'\]\['0'\] is a tensor .* sum 2 on rank 0 and .*sum 4"
    ):
        checkpoints.check_same({"ema": {"0": 2 * torch.ones(2)}})


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2])
def test_entries_of_short_types_are_compared(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[Any] = []

    def gather(found: list[Any], mine: Any) -> None:
        gathered.append(mine)
        found[:] = gathered

    monkeypatch.setattr(checkpoints.dist, "all_gather_object", gather)
    monkeypatch.setattr(checkpoints.dist, "get_world_size", lambda: 1)
    checkpoints.check_same({"ema": torch.full((4,), 40960.0).to(dtype)})
    with pytest.raises(BadInput, match=r"sum 163840 on rank 0 and .*sum 229376 on rank 1"):
        checkpoints.check_same({"ema": torch.full((4,), 57344.0).to(dtype)})


class Sums(nn.Module):
    """Two parameters with one gradient, whose entries are all one number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a + self.b).sum() + 0 * x.sum()


def test_parameters_with_one_gradient_are_clipped_once(one_process: None) -> None:
    job = Job(Sums(), (torch.ones(BATCH, 4),), torch.ones(BATCH), lambda y, _: y)
    trainer = build(sharding(job, "fsdp", 1), job, adamw)
    batch = ((torch.ones(BATCH, 4),), torch.ones(BATCH))
    for _ in range(2):
        trainer.forward_backward(batch)
    assert trainer.clip_grad_norm_(8**0.5) == pytest.approx(2 * 8**0.5)
    for parameter in trainer.parameters():
        assert parameter.grad.tolist() == pytest.approx([1.0] * 4)


def test_dropout_in_shards_is_refused_on_several_processes() -> None:
    from nostall.parallel.execute.trainer.build import _check_distributed

    job = Job(Block(8, 0.5), (torch.randn(4, 8),), torch.randn(4, 8), nn.functional.mse_loss)
    part: Any = type("Part", (), {"random_operators": ("aten.native_dropout",)})
    with pytest.raises(BadInput, match=r"draws random numbers \(aten.native_dropout\)"):
        _check_distributed(sharding(job, "fsdp", 2), part, job)


def test_a_hybrid_whose_stages_share_a_weight_is_refused() -> None:
    """Each stage would train its own."""
    own, other = (
        SimpleNamespace(stage=SimpleNamespace(names=names))
        for names in ({"p0": "words.weight", "p1": "up.weight"}, {"p0": "words.weight"})
    )
    hybrid_part._check_shared([own])
    with pytest.raises(BadInput, match=r"two stages of the hybrid read words\.weight"):
        hybrid_part._check_shared([own, other])


def test_samplers_give_each_sample_once_and_go_on_on_other_batch_sizes() -> None:
    passes = [0]
    halves = [
        OwnSampler(23, 4, lambda n, r=rank: range(r * n // 2, (r + 1) * n // 2), lambda: passes[0],
                   seed=5, drop_last=False) for rank in (0, 1)
    ]  # fmt: skip
    epoch = [[*a, *b] for a, b in zip(*halves, strict=True)]
    assert sorted(i for batch in epoch for i in batch) == list(range(23))
    assert [len(batch) for batch in epoch] == [halves[0].samples(n) for n in range(6)]
    passes[0] = 2
    other = OwnSampler(23, 3, range, lambda: passes[0], seed=5)
    other.load_state_dict(halves[0].state_dict())
    assert other.state_dict() == halves[0].state_dict()
    passes[0] = 77  # DCP may load the trainer after its sampler
    rest = [i for batch in epoch[2:] for i in batch]
    assert [i for batch in other for i in batch] == rest  # 15 samples are 5 batches
    passes[0] += 5
    assert other.epoch == 1 and sorted(next(iter(other))) != sorted(rest[:3])
    with pytest.raises(BadInput, match="has 2 samples and a batch of the plan 4"):
        OwnSampler(2, 4, range, lambda: 0)
