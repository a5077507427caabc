"""Ways to look faster without being it; every one is refused."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest

from nostall.optimizing.proof import CHANGED, block_order, prove

torch = pytest.importorskip("torch")

from nostall.attach.program import session, shadow  # noqa: E402
from nostall.attach.program.blocks import Schedule, Step  # noqa: E402
from nostall.attach.program.roots import Switch  # noqa: E402

nn = torch.nn


def model(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 32)
    )


def calls(*sizes: int) -> list[shadow.Call]:
    inputs = [
        torch.randn(size, 64, generator=torch.Generator().manual_seed(size)) for size in sizes
    ]
    return [shadow.Call((x,), {}, True, True, None) for x in inputs]


def finding(make: shadow.Make, root: Any = None, sizes: Sequence[int] = (16, 24)) -> shadow.Finding:
    return shadow.check_module(root if root is not None else model(), calls(*sizes), make)


Cheat = Callable[[Any], Callable[[Any], Any]]


def cached(module: Any) -> Callable[[Any], Any]:
    """Outputs remembered by the shape of their input."""
    outputs: dict[Any, Any] = {}
    return lambda x: outputs.setdefault(x.shape, module._call_impl(x))


def reused_identity(module: Any) -> Callable[[Any], Any]:
    """Values of the weights remembered by the identity of their module; gradients are right."""
    frozen = copy.deepcopy(module)

    def call(x: Any) -> Any:
        live = module._call_impl(x)
        return frozen(x).detach() + (live - live.detach())

    return call


class Lazy(torch.Tensor):
    """A tensor whose values could come later."""


def lazy(module: Any) -> Callable[[Any], Any]:
    return lambda x: module._call_impl(x).as_subclass(Lazy)


def dropped_precision(module: Any) -> Callable[[Any], Any]:
    def call(x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return module._call_impl(x).float()

    return call


def batched_calls(module: Any) -> Callable[[Any], Any]:
    """Answers a call with the result of the one before."""
    results: list[Any] = []

    def call(x: Any) -> Any:
        results.append(module._call_impl(x))
        return results[-2] if len(results) > 1 else torch.zeros_like(results[0])

    return call


def skipped_backward(module: Any) -> Callable[[Any], Any]:
    def call(x: Any) -> Any:
        with torch.no_grad():
            return module._call_impl(x)

    return call


def skipped_part_of_backward(module: Any) -> Callable[[Any], Any]:
    return lambda x: module[4](module[2](module[1](module[0](x).detach())))


def skipped_statistics(module: Any) -> Callable[[Any], Any]:
    def call(x: Any) -> Any:
        module[1].track_running_stats = False
        try:
            return module._call_impl(x)
        finally:
            module[1].track_running_stats = True

    return call


def uninitialised(module: Any) -> Callable[[Any], Any]:
    """Half of the output is what the memory held before."""

    def call(x: Any) -> Any:
        result = module._call_impl(x)
        output = torch.empty_like(result)
        output[: len(output) // 2] = result[: len(output) // 2]
        return output

    return call


def baked_shape(module: Any) -> Callable[[Any], Any]:
    """Computes the rows of the first call's shape only."""
    rows: list[int] = []

    def call(x: Any) -> Any:
        rows.append(len(x))
        return module._call_impl(x[: rows[0]])

    return call


def reused_output(module: Any) -> Callable[[Any], Any]:
    """One buffer for all outputs of a shape."""
    buffers: dict[Any, Any] = {}

    def call(x: Any) -> Any:
        result = module._call_impl(x)
        held = buffers.setdefault(result.shape, result)
        held.data.copy_(result.data)
        return result if held is result else result + (held - held.detach()) * 0

    return call


def random_unsaid(module: Any) -> Callable[[Any], Any]:
    return lambda x: module._call_impl(x) + 0 * torch.rand(1)


def failing(module: Any) -> Callable[[Any], Any]:
    def call(x: Any) -> Any:
        raise RuntimeError("out of memory")

    return call


@pytest.mark.parametrize(
    ("cheat", "reason"),
    [
        (cached, "fails|off by|outputs are"),
        (reused_identity, "off by"),
        (lazy, "outputs are"),
        (dropped_precision, "off by"),
        (batched_calls, "off by|outputs are"),
        (skipped_backward, "outputs are"),
        (skipped_part_of_backward, "gradients are missing"),
        (skipped_statistics, "off by|differs"),
        (uninitialised, "off by|NaN"),
        (baked_shape, "outputs are"),
        (random_unsaid, "draws random numbers"),
        (failing, "fails, so nothing is proven: RuntimeError: out of memory"),
    ],
)
def test_a_version_that_cheats_is_refused(cheat: Cheat, reason: str) -> None:
    found = finding(lambda module, _: cheat(module))
    assert re.search(reason, found.refusal), found


class Special(nn.Module):
    """A module with a value that is not finite in its buffer, in its outputs or all over them."""

    def __init__(self, place: str, value: float) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(64, 32), nn.Dropout(0.5 if "drawn" in place else 0.0)
        self.register_buffer("mask", torch.zeros(16, 32))
        if "buffer" in place:
            self.mask += torch.full((16, 32), value).triu(1)
        self.hidden = torch.zeros(32)
        self.hidden[: 32 if "all" in place else 4 if "outputs" in place else 0] = value

    def forward(self, x: Any) -> Any:
        return self.dropout(self.linear(x)) + self.hidden


@pytest.mark.parametrize("place", ["buffer", "outputs", "drawn outputs", "all"])
@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_a_value_that_is_not_finite_hides_no_other(place: str, value: float) -> None:
    root = Special(place, value)
    honest = finding(lambda module, _: module._call_impl, root, sizes=(16,))
    assert bool(honest.refusal) == (place == "all"), honest
    found = finding(lambda module, _: lambda x: 1.5 * module._call_impl(x), root, sizes=(16,))
    assert re.search("nothing is proven" if place == "all" else "off by", found.refusal), found
    other = finding(lambda module, _: lambda x: module._call_impl(x).nan_to_num(0.0), root, (16,))
    assert ("other NaN or infinities" in other.refusal) == ("outputs" in place), other


class Masked(nn.Module):
    """Attention over the samples, with scores masked by a buffer; the first has no other left."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 32)
        mask = torch.full((16, 16), value).triu(1)
        mask[0] = value
        self.register_buffer("mask", mask)

    def forward(self, x: Any) -> Any:
        hidden = self.linear(x)
        return (hidden @ hidden.T + self.mask).softmax(-1) @ hidden


@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, -1e9])
@pytest.mark.parametrize("kind", [Masked, lambda value: Special("outputs", value)])
def test_a_number_of_a_mask_hides_no_other(kind: Any, value: float) -> None:
    root = kind(value)
    assert not finding(lambda module, _: module._call_impl, root, sizes=(16,)).refusal

    def make(module: Any, _: bool) -> Any:
        def call(x: Any) -> Any:
            right = module._call_impl(x)
            return torch.where(right > value / 2, (1 + 1e-3) * right, right)

        return call

    assert "off by" in finding(make, root, sizes=(16,)).refusal


def test_a_buffer_that_is_reused_for_outputs_is_refused() -> None:
    held: list[Any] = []

    def make(module: Any, _: bool) -> Any:
        def call(x: Any) -> Any:
            result = module._call_impl(x)
            if held and held[0].shape == result.shape:
                held[0].data.copy_(result.data)
            held[:] = [result]
            return result

        return call

    assert "overwrites" in finding(make, sizes=(16,)).refusal
    held.clear()
    assert "overwrites" in finding(make, Special("outputs", torch.nan), sizes=(16,)).refusal


def test_results_that_the_original_left_in_memory_are_refused() -> None:
    memory: list[Any] = []

    class Leaving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 32)

        def forward(self, x: Any) -> Any:
            memory.append(self.linear(x))
            return memory[-1]

    def left(_: Any, __: bool) -> Any:
        return lambda x: memory[-1].clone()

    call = calls(16)[0]._replace(grad=False)
    assert "off by" in shadow.check_module(Leaving(), [call], left).refusal


def test_dropout_that_is_left_out_is_refused() -> None:
    def make(module: Any, same_random: bool) -> Any:
        if same_random:
            return module._call_impl
        without = copy.deepcopy(module)
        without[3].p = 0.0
        return without._call_impl

    assert "two seeds differ by" in finding(make, model(0.5)).refusal


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_an_honest_version_is_accepted(dropout: float) -> None:
    found = finding(lambda module, _: module._call_impl, model(dropout))
    assert found.refusal == ""
    assert found.result_class == ("other random numbers" if dropout else "bit-equal")


def test_another_order_of_the_same_sums_is_within_rounding() -> None:
    def make(module: Any, _: bool) -> Any:
        def call(x: Any) -> Any:
            weight = module[0].weight
            halves = x[:, :32] @ weight[:, :32].T + (x[:, 32:] @ weight[:, 32:].T + module[0].bias)
            return module[4](module[2](module[1](halves)))

        return call

    found = finding(make)
    assert (found.refusal, found.result_class) == ("", "within rounding")


def test_the_copy_leaves_the_program_as_it_was() -> None:
    root = model(0.5)
    before, random = copy.deepcopy(root.state_dict()), torch.get_rng_state()
    finding(lambda module, _: module._call_impl, root)
    assert all(torch.equal(before[name], value) for name, value in root.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in root.parameters())


# The optimiser.


def stepped() -> Any:
    root = model()
    optimizer = torch.optim.AdamW(root.parameters(), lr=1e-2)
    root(calls(16)[0].args[0]).square().mean().backward()
    optimizer.step()
    return optimizer


def test_an_optimiser_that_skips_work_is_refused() -> None:
    def skip(twin: Any) -> None:
        twin.param_groups[0]["params"] = twin.param_groups[0]["params"][1:]

    def no_decay(twin: Any) -> None:
        twin.param_groups[0]["weight_decay"] = 0.0

    for cheat in (skip, no_decay):
        assert "off by" in shadow.check_optimizer(stepped(), cheat).refusal


def test_an_honest_optimiser_is_accepted() -> None:
    def foreach(twin: Any) -> None:
        twin.param_groups[0]["foreach"] = True

    def fused(twin: Any) -> None:
        twin.param_groups[0]["fused"] = True

    assert shadow.check_optimizer(stepped(), foreach).result_class == "bit-equal"
    assert shadow.check_optimizer(stepped(), fused).refusal == ""


# Measured blocks.


class Device:
    """A device with streams; the host only launches."""

    def __init__(self) -> None:
        self.host, self.ends = 0.0, [0.0, 0.0]

    def launch(self, seconds: float, stream: int = 0) -> None:
        self.host += 0.001
        self.ends[stream] = max(self.host, self.ends[stream]) + seconds

    def sync(self) -> None:
        """As ``torch.cuda.synchronize``: waits for all streams."""
        self.host = max(self.host, *self.ends)


@pytest.mark.parametrize("stream", [0, 1])
def test_work_that_was_only_launched_counts(stream: int) -> None:
    device, events = Device(), []
    order = {"arms": [[], ["x"]], "blocks": [0, 1], "steps": 3, "each": False}
    arm: list[Sequence[str]] = []
    schedule = Schedule(
        order, apply=arm.append, sync=device.sync, now=lambda: device.host,
        emit=lambda event, **fields: events.append(fields),
    )  # fmt: skip
    for _ in range(20):
        device.launch(0.1, stream if arm[-1] else 0)
        if schedule.border(Step(1, (), 0)):
            break
    assert [round(event["seconds"], 2) for event in events] == [0.3, 0.3]


def test_the_device_is_waited_for_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: waited.append(device))
    session._sync()
    assert waited == [()]


def test_a_patched_timer_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) * 1e-9)
    first, second = session._clock(), session._clock()
    assert second > first and first % 1e-9 != 0.0
    assert session._clock is not time.perf_counter


def blocks(
    seconds: Callable[[int, int], float], steps: Callable[[int, int], list[Any]], rounds: int = 12
) -> list[dict[str, Any]]:
    """Events of blocks; ``seconds`` and ``steps`` by the place of a block and its arm."""
    return [
        {"arm": arm, "seconds": seconds(at, arm), "steps": steps(at, arm), "compiled": False,
         "failures": []}
        for at, arm in enumerate(block_order(rounds, 3))
    ]  # fmt: skip


def noisy(at: int) -> float:
    return 1.0 + 0.002 * (at * 7 % 5)


USUAL = [(1, None, False)] * 4


def test_a_real_gain_is_kept() -> None:
    proof = prove(
        blocks(lambda at, arm: noisy(at) / (1.2 if arm == CHANGED else 1), lambda *_: USUAL),
        each=False, bound=2.0,
    )  # fmt: skip
    assert proof.faster and proof.comparison is not None
    assert proof.comparison.ratio == pytest.approx(1.2, rel=0.01)


def test_borders_that_move_are_refused() -> None:
    """The changed arm ends a step after half of its calls."""
    half = [(2, None, False)] * 4
    proof = prove(
        blocks(lambda at, arm: 0.5 if arm == CHANGED else noisy(at),
               lambda at, arm: half if arm == CHANGED else USUAL),
        each=False,
    )  # fmt: skip
    assert not proof.faster and "0 comparable pairs" in proof.refusal


def test_overflow_steps_are_refused() -> None:
    """A GradScaler skips the optimiser in the changed arm."""
    skipping = [(1, None, True)] * 4
    for each in (False, True):
        proof = prove(
            blocks(lambda at, arm: noisy(at),
                   lambda at, arm: skipping if arm == CHANGED else [(1, 0.25, False)] * 4),
            each=each,
        )  # fmt: skip
        assert not proof.faster and "comparable pairs" in proof.refusal


def test_easier_batches_are_no_gain() -> None:
    """Every third block has cheap data of the same shape."""
    for offset in range(3):
        proof = prove(
            blocks(lambda at, arm, o=offset: 0.5 if at % 3 == o else noisy(at), lambda *_: USUAL),
            each=False,
        )  # fmt: skip
        assert not proof.faster


def test_shorter_batches_in_one_arm_are_refused() -> None:
    def steps(at: int, arm: int) -> list[Any]:
        return [(5, 0.1, False)] * 4 if arm == CHANGED else [(6, 0.2, False)] * 4

    proof = prove(blocks(lambda at, arm: noisy(at), steps), each=True)
    assert not proof.faster and "0 comparable pairs" in proof.refusal


@pytest.mark.parametrize(("epoch", "length"), [(13, 200), (7, 20), (61, 17)])
def test_blocks_with_a_shorter_last_batch_more_are_compared_with_their_like(
    epoch: int, length: int
) -> None:
    """A loader without `drop_last`: the rounds seldom have three blocks of equal work."""

    def steps(at: int, arm: int) -> list[Any]:
        places = range(at * (length + 1), at * (length + 1) + length)
        return [(2 if place % epoch == epoch - 1 else 1, None, False) for place in places]

    def seconds(at: int, arm: int) -> float:
        work = sum(0.5 if key == 2 else 1.0 for key, *_ in steps(at, arm))
        return noisy(at) * work / (1.1 if arm == CHANGED else 1)

    proof = prove(blocks(seconds, steps, rounds=16), each=False)
    assert proof.pairs >= 6 and proof.faster and proof.comparison is not None
    assert proof.comparison.ratio == pytest.approx(1.1, rel=0.02)


@pytest.mark.parametrize("each", [False, True])
def test_blocks_that_compiled_move_no_pairs(each: bool) -> None:
    """Steps get faster while the run goes on, and the first changed block compiled."""

    def slowed(at: int) -> float:
        return noisy(at) * (1 + 0.2 * 0.9**at)

    found = blocks(lambda at, arm: slowed(at), lambda at, arm: [(1, slowed(at), False)], rounds=8)
    next(block for block in found if block["arm"] == CHANGED)["compiled"] = True
    proof = prove(found, each=each)
    assert proof.pairs == 7 and not proof.faster and proof.comparison is not None
    assert proof.comparison.ratio < 1.005


def test_work_in_the_time_of_the_original_is_refused() -> None:
    """Work that is put off, or a cache that is taken away: the block after the change pays."""
    arms = block_order(12, 3)

    def seconds(at: int, arm: int) -> float:
        if arm == CHANGED:
            return 0.7
        return 1.3 if at and arms[at - 1] == CHANGED else noisy(at)

    proof = prove(blocks(seconds, lambda *_: USUAL), each=False)
    assert not proof.faster and "slower in the blocks after the changed ones" in proof.refusal


def test_a_gain_above_its_bound_is_refused() -> None:
    events = blocks(lambda at, arm: noisy(at) / (2 if arm == CHANGED else 1), lambda *_: USUAL)
    proof = prove(events, each=False, bound=1.5)
    assert not proof.faster and "above its bound" in proof.refusal


def test_a_version_that_fell_back_is_refused() -> None:
    events = blocks(lambda at, arm: 0.5 if arm == CHANGED else 1.0, lambda *_: USUAL)
    events[-1]["failures"] = ["RuntimeError: no"]
    assert "failed in a step" in prove(events, each=False).refusal


def test_compiling_is_not_measured() -> None:
    events = blocks(lambda at, arm: noisy(at), lambda *_: USUAL)
    for event in events[:-9]:
        event["compiled"] = True
    assert "comparable pairs" in prove(events, each=False).refusal


def test_a_failing_version_gives_the_program_the_original() -> None:
    root, seen = model(), []
    switch = Switch(root, [], lambda *_: None)
    switch.target = failing(root)
    x = calls(16)[0].args[0]
    seen.append(root(x))
    assert switch.failure is not None and "out of memory" in switch.failure
    assert seen[0].shape == (16, 32) and switch.target is None
    switch.settle()
    assert "_compiled_call_impl" not in root.__dict__


class Cache:
    """Keys of earlier calls, in an object that is neither list nor mapping."""

    def __init__(self) -> None:
        self.keys = [torch.ones(1, 64)]


class Decoder(nn.Module):
    """Attends to the keys of earlier calls, and appends its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(64, 64)

    def forward(self, x: Any, cache: Any) -> Any:
        cache.keys.append(self.inner(x))
        return (x @ torch.cat(cache.keys).T).softmax(-1), cache


def of_cache(make: shadow.Make) -> tuple[shadow.Finding, Cache]:
    cache = Cache()
    args, kwargs = shadow.clone(((torch.ones(4, 64), cache), {}))
    assert args[1] is not cache
    call = shadow.Call(args, kwargs, True, False, None)
    return shadow.check_module(Decoder(), [call], make), args[1]


def test_a_cache_of_the_program_is_left_alone_and_compared() -> None:
    def foreign_keys(module: Any) -> Any:
        """Right outputs, and wrong keys for the next call."""

        def call(x: Any, cache: Any) -> Any:
            result = module._call_impl(x, cache)
            cache.keys[-1] = cache.keys[-1] * 1.01
            return result

        return call

    honest, cache = of_cache(lambda module, same: module._call_impl)
    assert honest.refusal == "" and honest.result_class == "bit-equal"
    assert len(cache.keys) == 1
    cheat, _ = of_cache(lambda module, same: foreign_keys(module))
    assert "is off by" in cheat.refusal
