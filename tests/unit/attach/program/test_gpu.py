"""Changes of a program on a real GPU; skipped without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from nostall.attach.program import shadow  # noqa: E402
from nostall.attach.program.changes import (  # noqa: E402
    ChannelsLast,
    Compile,
    OptimizerFlag,
    make_change,
)
from nostall.attach.program.changing.captured import can_capture  # noqa: E402
from nostall.attach.program.changing.losses import CompiledLoss, Losses  # noqa: E402
from nostall.attach.program.roots import Switch  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    # A hint of Inductor; with `-W error` it would end the compilation.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    # A graph of Inductor without a kernel, captured and dropped while it warms up.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]
nn = torch.nn


class Images(nn.Module):
    """A small network of convolutions with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.1),
            nn.Conv2d(32, 64, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 8),
        )  # fmt: skip

    def forward(self, x: Any) -> Any:
        return self.layers(x)


def trained(steps: int = 2, **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    root = Images().cuda()
    optimizer = torch.optim.AdamW(root.parameters(), lr=1e-3, **options)
    for _ in range(steps):
        step(root, optimizer)
    return root, optimizer, Switch(root, [], lambda *_: None)


def images() -> Any:
    return torch.randn(8, 16, 16, 16, device="cuda")


def step(root: Any, optimizer: Any, scaler: Any = None) -> None:
    optimizer.zero_grad()
    loss = root(images()).square().mean()
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def calls() -> dict[int, list[shadow.Call]]:
    return {0: [shadow.Call((images(),), {}, True, True, None)]}


@pytest.mark.parametrize("value", ["inductor", "reduce-overhead"])
def test_compiled_versions_are_proven_and_run(value: str) -> None:
    root, optimizer, switch = trained()
    change = Compile([switch], value)
    found = change.check(calls())
    assert found.refusal == "" and found.result_class == "other random numbers"
    kept: list[tuple[Any, Any]] = []
    for _ in range(2):
        change.on()
        for _ in range(5):
            optimizer.zero_grad()
            output = root(images())
            kept.append((output.detach(), output.detach().clone()))
            output.square().mean().backward()
            optimizer.step()
        change.off()
        step(root, optimizer)
    assert switch.failure is None
    # Later replays leave the outputs of earlier ones as they were.
    assert all(torch.equal(output, copied) for output, copied in kept)


def test_channels_last_with_a_fused_optimiser_and_back() -> None:
    root, optimizer, switch = trained()
    layout, fused = ChannelsLast([switch], [optimizer]), OptimizerFlag([optimizer], "fused")
    assert layout.check(calls()).refusal == ""
    assert fused.check({}).refusal == ""
    weight = root.layers[0].weight
    for _ in range(2):
        layout.on()
        fused.on()
        step(root, optimizer)
        assert weight.is_contiguous(memory_format=torch.channels_last)
        assert optimizer.state[weight]["step"].is_cuda
        layout.off()
        fused.off()
        step(root, optimizer)
        assert weight.is_contiguous() and not optimizer.state[weight]["step"].is_cuda


def test_a_scaler_and_a_fused_optimiser() -> None:
    root, optimizer, _ = trained()
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    fused = OptimizerFlag([optimizer], "fused")
    step(root, optimizer, scaler)
    for _ in range(2):
        fused.on()
        step(root, optimizer, scaler)
        fused.off()
        before = [p.detach().clone() for p in root.parameters()]
        step(root, optimizer, scaler)
        pairs = list(zip(before, root.parameters(), strict=True))
        assert all(bool(p.isfinite().all()) for _, p in pairs)
        assert not all(torch.equal(a, b) for a, b in pairs)


def test_results_of_a_check_stay_on_the_gpu_where_there_is_room() -> None:
    (copied,) = shadow._copies([torch.ones(8, device="cuda")])
    assert copied.is_cuda


def test_float32_convolutions_are_computed_in_tf32() -> None:
    root, *_ = trained()
    assert shadow._Bench(root)._rounding(calls()[0][0]) == shadow.TF32


@pytest.mark.parametrize(
    ("kind", "options"),
    [("AdamW", {}), ("Adam", {"fused": True}), ("SGD", {"momentum": 0.9}), ("Adagrad", {})],
)
def test_replayed_steps_are_those_of_the_optimiser(kind: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    roots = [nn.Linear(64, 64, device="cuda") for _ in range(2)]
    roots[1].load_state_dict(roots[0].state_dict())
    optimizers = [getattr(torch.optim, kind)(r.parameters(), lr=1e-2, **options) for r in roots]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.999) for o in optimizers]
    x, change = torch.randn(32, 64, device="cuda"), None
    for at in range(40):
        if at == 2:
            assert can_capture(optimizers[0])
            description = {"kind": "optimizer", "value": "captured"}
            change = make_change(description, [], optimizers[:1])
            assert change.check({})[:2] == ("within rounding", "")
        if change is not None:
            (change.off if at % 10 == 5 else change.on)()
        for root, optimizer, schedule in zip(roots, optimizers, schedules, strict=True):
            optimizer.zero_grad()
            root(x).square().mean().backward()
            optimizer.step()
            if at < 20:
                schedule.step()
    steps = change.captured[0]
    assert steps.graphs and steps.failure == ""
    assert torch.allclose(roots[0].weight, roots[1].weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("words", [["--check"], []])
def test_gradients_of_several_calls_add_up_in_marked_graphs(words: list[str]) -> None:
    # In a process of its own, whose steps nothing has marked; as `nostall apply`, with no check.
    script = Path(__file__).with_name("marked_graphs.py")
    run = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]


def test_a_compiled_loss_is_within_rounding() -> None:
    losses = Losses(lambda: True)
    losses.install(nn.functional)
    try:
        layer = nn.Linear(64, 8192, device="cuda")
        change = CompiledLoss(losses)
        values = []
        for at in range(6):
            losses.wanted = at == 1
            if at == 2:
                assert change.check({}).refusal == ""
            (change.on if at > 3 else change.off)()
            torch.manual_seed(0)
            with torch.autocast("cuda", torch.bfloat16):
                logits = layer(torch.randn(1024, 64, device="cuda"))
                target = torch.randint(8192, (1024,), device="cuda")
                loss = nn.functional.cross_entropy(logits, target)
            layer.zero_grad()
            loss.backward()
            values.append((loss.item(), layer.weight.grad.norm().item()))
        assert losses.failure == "" and losses.largest == 1 << 23
        assert values[5] == pytest.approx(values[0], rel=1e-3)
    finally:
        change.off()
        losses.settle()
