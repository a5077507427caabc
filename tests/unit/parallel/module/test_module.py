"""Modules as layers: cuts, tensors that cross them, measured profiles, rejected modules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="modules need the extra nostall[torch]")

from nostall.core.errors import MissingPart  # noqa: E402
from nostall.parallel.errors import BadModel, BadPlan  # noqa: E402
from nostall.parallel.module import Job, Model, load_job, profile_job  # noqa: E402
from nostall.parallel.plan import Workload  # noqa: E402
from tests.unit.parallel import jobs  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def leaves() -> Model:
    return Model(jobs.resnet(), "leaf")


def test_blocks_and_leaves_become_layers(leaves: Model) -> None:
    blocks = Model(leaves.job)
    assert blocks.layer_names == ("conv1", "bn1", "relu", "layer1.0", "layer2.0", "avgpool", "fc")
    assert "layer2.0.downsample.0" in leaves.layer_names
    assert "layer1.0.relu#2" in leaves.layer_names  # the second call, after the sum
    # Inside a block two tensors cross: the block's intermediate value and the skip connection.
    inside = leaves.layer_names.index("layer1.0.conv2")
    assert len(leaves.crossing(inside)) == 2
    assert len(leaves.crossing(leaves.layer_names.index("layer2.0.downsample.0"))) == 1


def test_segments_in_sequence_equal_the_module(leaves: Model) -> None:
    inputs, targets = leaves.job.example_batch(4)
    values: dict[str, torch.Tensor] = {}
    for i in range(len(leaves)):
        segment = leaves.segment(i, i + 1, 4, CPU)
        outputs = segment(values, inputs, targets)
        values = {name: outputs.get(name, values.get(name)) for name in segment.sent} or outputs
        assert all(tuple(v.shape) == leaves.shape(k, 4) for k, v in values.items() if k != "loss")
    expected = leaves.job.loss(leaves.job.module(*inputs), targets)
    assert torch.equal(values["loss"], expected)


def test_a_shared_parameter_belongs_to_both_its_stages() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(7, 4)
            self.middle = torch.nn.Linear(4, 4)
            self.head = torch.nn.Linear(4, 7, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.middle(self.table(x))))

    words = torch.randint(0, 7, (6,))
    model = Model(Job(Tied(), (words,), words, torch.nn.functional.cross_entropy))
    first, last = (model.stage_parameters(i, i + 1) for i in (0, 2))
    assert first[0] is last[0]


def test_tensors_that_cannot_be_sliced_by_samples_are_not_cut() -> None:
    class Mixed(torch.nn.Module):
        """Has a tensor of shape (samples, samples) between its layers."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            return self.second((y @ y.T) @ x)

    model = Model(
        Job(Mixed(), (torch.randn(5, 4),), torch.randn(5, 4), torch.nn.functional.mse_loss)
    )
    assert (
        len(model) == 2
    )  # both products belong to the first layer; its output is sliced by samples
    assert model.sample_dim[model.crossing(1)[0]] == 0


def test_a_profile_is_measured() -> None:
    wide = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 1024))
    job = Job(wide, (torch.randn(64, 16),), torch.randn(64, 1024), torch.nn.functional.mse_loss)
    profile = profile_job(job, repeats=3)
    assert [layer.name for layer in profile.layers] == ["0", "1"]
    assert profile.batch == 64
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in profile.layers)
    small, large = profile.layers
    assert (small.parameter_bytes, large.parameter_bytes) == (4 * 16 * 17, 4 * 1024 * 17)
    # The first layer stores the batch; the second its input, and the loss the two tensors that it
    # compares.
    assert small.stored_bytes == 64 * 16 * 4
    assert large.stored_bytes is not None and large.stored_bytes >= 64 * (16 + 1024) * 4
    assert profile.memory_measured
    (tensor,) = profile.tensors
    assert (tensor.producer, tensor.last_consumer, tensor.bytes) == (0, 1, 64 * 16 * 4)
    assert Workload(profile, _one_gpu(), 128).micro_batches == 2
    assert all(p.grad is None for p in wide.parameters())


def test_passes_are_added_until_their_spread_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    from nostall.parallel.module import profiler

    assert profiler.pass_spread([1.0, 1.0]) is None
    assert profiler.pass_spread([1.0, 1.0, 1.0]) == 0
    assert profiler.pass_spread([1.0, 9.0, 1.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0]) == 1.5
    assert profiler.pass_seconds([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]]) == [16, 20]
    job = jobs.chain()
    monkeypatch.setattr(profiler, "pass_spread", lambda totals: 0.2 if len(totals) < 40 else 0.01)
    profile = profile_job(job)
    assert (profile.passes, profile.spread) == (48, 0.01)
    monkeypatch.setattr(profiler, "MAX_SECONDS", 0.0)
    assert profile_job(job).passes == profiler.MIN_PASSES


def _one_gpu() -> Any:
    from tests.unit.parallel.cases import servers

    return servers(1, 1)


def test_batch_statistics_are_rejected_unless_they_are_frozen() -> None:
    with pytest.raises(BadModel, match=r"bn1 is a BatchNorm2d.*eval mode"):
        jobs.resnet(torch.nn.BatchNorm2d)
    module = jobs.ResNet(torch.nn.BatchNorm2d).eval()
    job = Job(module, (torch.randn(4, 3, 6, 6),), torch.randint(0, 5, (4,)), jobs.F.cross_entropy)
    assert len(Model(job)) == 7


class _ChangesBuffer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.layer(x) * self.calls


class _BranchesOnValue(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y if y.sum() > 0 else -y


class _BranchesOnBatchSize(_BranchesOnValue):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y.sin() if x.shape[0] == 2 else y.cos()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (_ChangesBuffer, "changes the buffer calls"),
        (_BranchesOnValue, "torch.export cannot trace"),
        (_BranchesOnBatchSize, "other operations at 3 samples"),
        (torch.nn.Identity, "depends on no parameter"),
    ],
)
def test_modules_that_cannot_be_cut_are_rejected(module: type, message: str) -> None:
    job = Job(module(), (torch.randn(4, 3),), torch.randn(4, 3), jobs.F.mse_loss)
    with pytest.raises(BadModel, match=message):
        Model(job)


def test_a_loss_that_is_not_a_scalar_is_rejected() -> None:
    job = replace(jobs.chain(), loss=lambda output, target: output - target)
    with pytest.raises(BadModel, match="no scalar"):
        Model(job)


FILE = """
import torch
def good():
    zeros = torch.zeros(4, 2)
    return torch.nn.Linear(2, 2), (zeros,), zeros, torch.nn.functional.mse_loss
def short():
    return torch.nn.Linear(2, 2), (torch.zeros(4, 2),)
def wrong():
    return "linear", (), None, None
def fails():
    raise ValueError("no data")
def empty():
    return torch.nn.Linear(2, 2), (3,), None, torch.sum
"""


def test_jobs_are_loaded_by_name(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(FILE)
    assert load_job(f"{path}:good").samples == 4
    for name, message in (
        ("short", "returned a tuple"),
        ("wrong", "the module is a str"),
        ("fails", "ValueError: no data"),
        ("empty", "no tensor with samples"),
        ("missing", "has no function missing"),
    ):
        with pytest.raises(BadModel, match=message):
            load_job(f"{path}:{name}")
    for target in (str(path), "train:good", f"{path}:no name"):
        with pytest.raises(BadModel, match=r"path\.py:build"):
            load_job(target)
    with pytest.raises(BadModel, match="no such file"):
        load_job(f"{tmp_path}/none.py:good")
    path.write_text("import a_package_that_is_not_there")
    with pytest.raises(MissingPart, match="a_package_that_is_not_there"):
        load_job(f"{path}:good")


def test_batches_must_have_the_samples_of_the_iteration() -> None:
    job = jobs.chain()
    inputs, targets = job.batch(0, 20)
    assert inputs[0].shape == (20, 6) and torch.equal(targets[9:18], targets[:9])
    own_batches = replace(job, batches=lambda step: job.example_batch(7))
    assert own_batches.batch(3, 7)[0][0].shape == (7, 6)
    with pytest.raises(BadModel, match="has 7 samples; allowed is 20"):
        own_batches.batch(3, 20)


def test_a_plan_of_another_model_is_rejected() -> None:
    from nostall.parallel.execute.preconditions import check_layers

    model = Model(jobs.chain())
    other = Model(jobs.resnet())
    work = Workload(profile_job(other.job, repeats=1), _one_gpu(), 8)
    with pytest.raises(BadPlan, match="layer 0: conv1 in the plan, 0 in the module"):
        check_layers(model, work)
