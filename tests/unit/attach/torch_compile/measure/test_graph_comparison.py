"""Comparison of two versions of a graph: accuracy, noise, side effects.  Nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from nostall.attach.torch_compile.measure import accuracy, graph_comparison  # noqa: E402
from nostall.attach.torch_compile.measure.accuracy import run_graph  # noqa: E402
from nostall.attach.torch_compile.measure.call import AccuracyError, Call  # noqa: E402
from nostall.attach.torch_compile.measure.graph_comparison import (  # noqa: E402
    GraphClocks,
    NoStitchedKernel,
    compare_graphs,
    judge,
)
from nostall.attach.torch_compile.runtime.custom_op import record_call  # noqa: E402
from nostall.attach.torch_compile.store.records import ComparisonRecord  # noqa: E402
from nostall.gpu.clock import RecordedClock  # noqa: E402

SAME = RecordedClock({"*": [[1.0] * 12, [1.0] * 12, [1.0] * 12]})
GRAPH = "a" * 64


@pytest.fixture(autouse=True)
def _gradients_enabled() -> Iterator[None]:
    yield
    torch.set_grad_enabled(True)


def compare(baseline: Callable[..., Any], candidate: Callable[..., Any], *args: Tensor) -> Any:
    """The record of a comparison, and the kernels that the candidate called."""
    call = Call.record(args, frozenset())
    return compare_graphs(GRAPH, baseline, candidate, call, GraphClocks(SAME, 0.1))


class NoisyClock:
    """A clock whose second measurement has other samples for the candidate than the first."""

    name, kind = "noisy", "measured"

    def __init__(self, first: list[float], second: list[float]) -> None:
        self.first, self.second, self.asked = first, second, list[float]()

    def samples(self, graph: str, runs: Any, seconds: float) -> list[list[float]]:
        self.asked.append(seconds)
        candidate = self.first if len(self.asked) == 1 else self.second
        return [[1.0] * 12, candidate, [1.0] * 12]


@pytest.mark.parametrize(
    ("first", "second", "asked", "verdict"),
    [
        ([0.9, 1.05] * 6, [0.95] * 12, [0.1, 0.4], "faster"),
        ([0.9, 1.05] * 6, [1.0] * 12, [0.1, 0.4], "same"),
        ([0.95] * 12, [], [0.1], "faster"),
        ([1.05] * 12, [], [0.1], "slower"),
    ],
)
def test_if_noise_may_hide_a_gain_one_longer_measurement_decides(
    first: list[float], second: list[float], asked: list[float], verdict: str
) -> None:
    def version(x: Tensor) -> tuple[Tensor]:
        record_call("kernel")
        return (x,)

    clock = NoisyClock(first, second)
    call = Call.record([torch.ones(3)], frozenset())
    record, _ = compare_graphs(GRAPH, version, version, call, GraphClocks(clock, 0.1))
    assert clock.asked == pytest.approx(asked)
    assert record.comparison().verdict == verdict
    assert list(record.stitched) == (second or first)


def slowed(ratio: float) -> RecordedClock:
    """A clock by which the candidate is so many times as fast."""
    return RecordedClock({"*": [[ratio] * 12, [1.0] * 12, [ratio] * 12]})


@pytest.mark.parametrize(
    ("loop", "replays", "verdict", "decides"),
    [
        (1.1, 1.2, "faster", "recorded and recorded graphs"),
        (1.1, 1.0, "faster", "recorded"),
        (1.0, 1.2, "faster", "recorded graphs"),
        (1.1, 0.9, "slower", "recorded graphs"),
        (1.0, 0.9, "slower", "recorded graphs"),
        (1.0, 1.0, "same", "recorded and recorded graphs"),
        (1.0, 1.005, "same", "recorded and recorded graphs"),
        # Replays are not measured then.
        (0.9, 1.2, "slower", "recorded"),
    ],
)
def test_a_candidate_that_is_slower_by_either_clock_is_not_selected(
    loop: float, replays: float, verdict: str, decides: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(x: Tensor) -> tuple[Tensor]:
        record_call("kernel")
        return (x,)

    monkeypatch.setattr(graph_comparison, "peak_bytes", lambda run, args: 1 << 20)
    other = slowed(replays)
    other.name = "recorded graphs"
    call = Call.record([torch.ones(3)], frozenset())
    clocks = GraphClocks(slowed(loop), 0.1, other)
    record, _ = compare_graphs(GRAPH, version, version, call, clocks)
    assert (record.verdict, judge(record), record.deciding_clock) == (verdict, verdict, decides)
    assert (record.replayed is None) == (loop < 1.0)
    assert ComparisonRecord.read(record.json) == record
    assert (f"decided by {decides}" in str(record)) == (loop >= 1.0)


def _same(x: Tensor) -> tuple[Tensor]:
    return (x,)


def test_a_gain_by_graphs_must_exceed_what_a_noisy_loop_may_lose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graph_comparison, "peak_bytes", lambda run, args: 1 << 20)
    noise = [0.9, 0.95, 0.97, 1.05] * 3
    loop = RecordedClock({"*": [noise, [1.0] * 12, [1.0] * 12]})
    call = Call.record([torch.ones(3)], frozenset())
    for ratio, verdict in ((1.02, "same"), (1.2, "faster")):
        clocks = GraphClocks(loop, 0.1, slowed(ratio))
        record, _ = compare_graphs(
            GRAPH, _same, _same, call, clocks, needs_kernels=False, repeats=False
        )
        assert record.comparison().verdict == "same"
        assert record.verdict == verdict


def test_steps_that_cannot_be_captured_are_timed_in_a_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Failing(RecordedClock):
        def samples(self, graph: str, runs: Any, seconds: float) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    def version(x: Tensor) -> tuple[Tensor]:
        record_call("kernel")
        return (x,)

    call = Call.record([torch.ones(3)], frozenset())
    for peak in (1 << 20, None):
        monkeypatch.setattr(graph_comparison, "peak_bytes", lambda run, args, peak=peak: peak)
        clocks = GraphClocks(slowed(1.1), 0.1, Failing({}))
        record, _ = compare_graphs(GRAPH, version, version, call, clocks)
        assert record.replayed is None
        assert record.verdict == "faster"


def test_a_comparison_has_the_memory_of_inputs_that_share_some_once() -> None:
    def version(*args: Tensor) -> tuple[Tensor]:
        record_call("kernel")
        return (args[0] * 2,)

    parameter, other = torch.ones(100, requires_grad=True), torch.ones(8, 4)
    record, _ = compare(version, version, parameter, other, other.t(), other[2:], torch.ones(0))
    assert record.input_bytes == 4 * (100 + 32)


def test_mutated_arguments_are_copied() -> None:
    state = torch.zeros(3)

    def version(x: Tensor, s: Tensor) -> tuple[Tensor]:
        record_call("kernel")
        s.add_(1)
        return (x + s,)

    call = Call.record([torch.ones(3), state], frozenset({1}))
    compare_graphs(GRAPH, version, version, call, GraphClocks(SAME, 0.1))
    assert state.tolist() == [0.0, 0.0, 0.0]


def test_an_argument_with_a_gradient_may_be_changed_in_place() -> None:
    """What a graph break leaves between two graphs has a gradient, and is no leaf."""
    weight = torch.randn(3, requires_grad=True)
    hidden = (torch.randn(4, 3, requires_grad=True) * 1.0)[:, :3]

    def version(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        record_call("kernel")
        hidden.mul_(weight)
        return (hidden.sin(),)

    def wrong(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        record_call("kernel")
        hidden.mul_(weight)
        return (hidden.detach().sin() + 0.0 * hidden,)

    call = Call.record([hidden, weight], frozenset({0}))
    assert call.keeps_history
    record, _ = compare_graphs(GRAPH, version, version, call, GraphClocks(SAME, 0.1), version)
    assert record.difference < 1e-6
    results = run_graph(version, call.fresh_args())
    expected = results.seeds[0] * (hidden * weight).cos()
    torch.testing.assert_close(results.gradients, [expected * weight, (expected * hidden).sum(0)])
    for program in (version, None):
        with pytest.raises(AccuracyError):
            compare_graphs(GRAPH, version, wrong, call, GraphClocks(SAME, 0.1), program)


def test_both_versions_draw_equal_random_numbers_and_generators_are_restored() -> None:
    def version(x: Tensor) -> tuple[Tensor]:
        record_call("kernel")
        return (x * torch.rand_like(x),)

    torch.manual_seed(3)
    before = torch.get_rng_state()
    record, _ = compare(version, version, torch.ones(3))
    assert record.difference == 0.0
    assert torch.equal(before, torch.get_rng_state())


def other_strides(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def test_a_gradient_may_have_the_layout_of_its_leaf() -> None:
    """Inductor's gradient of a transposed operand has another one, and neither is wrong."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, layout: Callable[[Tensor], Tensor]) -> Tensor:
            ctx.layout = layout
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return ctx.layout(gradient * 2), None

    def version(layout: Callable[[Tensor], Tensor]) -> Callable[[Tensor], tuple[Tensor]]:
        def run(x: Tensor) -> tuple[Tensor]:
            record_call("kernel")
            return (Scaled.apply(x, layout),)

        return run

    leaf = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    transposed, plain = version(other_strides), version(lambda x: x)
    record, _ = compare(transposed, plain, leaf)
    assert record.difference == 0.0
    with pytest.raises(AccuracyError, match="strides"):
        compare(plain, transposed, leaf)


def other_nan(x: Tensor) -> Tensor:
    return torch.where(x == 0, torch.nan, x)


@pytest.mark.parametrize(
    ("change", "message"),
    [(other_strides, "strides"), (other_nan, "off by"), (lambda x: x.double(), "float64")],
)
def test_a_result_with_other_values_or_layout_is_an_error(
    change: Callable[[Tensor], Tensor], message: str
) -> None:
    def candidate(x: Tensor) -> tuple[Tensor]:
        record_call("kernel")
        return (change(x),)

    with pytest.raises(AccuracyError, match=message):
        compare(lambda x: (x,), candidate, torch.arange(12.0).view(3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_wrong_element_of_many_is_an_error(dtype: torch.dtype) -> None:
    """In the norm of the whole tensor it disappears."""

    def one_wrong(x: Tensor) -> tuple[Tensor]:
        record_call("kernel")
        y = x.clone()
        y[777, 3] += 1
        return (y,)

    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(1)).to(dtype)
    with pytest.raises(AccuracyError, match="is off by"):
        compare(lambda x: (x,), one_wrong, x)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bit_results_may_be_rounded_the_other_way_at_some_elements_only(
    dtype: torch.dtype,
) -> None:
    wide = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))

    def difference(other: Tensor) -> float:
        def candidate(x: Tensor) -> tuple[Tensor]:
            record_call("kernel")
            return (other.to(dtype),)

        record, _ = compare(lambda x: (x.to(dtype),), candidate, wide)
        return float(record.difference)

    assert 0 < difference(wide * (1 + 2**-11)) < 0.03
    for other in (torch.zeros_like(wide), -wide, wide.flip(0), wide * 1.5):
        with pytest.raises(AccuracyError, match="off by"):
            difference(other)


def test_a_rounding_error_at_every_element_is_allowed() -> None:
    def rounded(x: Tensor) -> tuple[Tensor]:
        record_call("kernel")
        return ((x.float() * (1 + 2**-8)).to(x.dtype),)

    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    record, _ = compare(lambda x: (x,), rounded, x)
    assert 0 < record.difference < 0.01


def test_nan_equals_nan() -> None:
    def version(x: Tensor) -> tuple[Tensor]:
        record_call("kernel")
        return (x / x * x,)

    record, kernels = compare(version, version, torch.arange(4.0))
    assert record.difference == 0.0
    assert kernels == ("kernel",)


def bias_before_norm(wide: bool, wrong: float = 0.0) -> Callable[..., tuple[Tensor]]:
    """A function whose gradient of the bias is 0 but for rounding, in bf16 or fp32."""

    def version(x: Tensor, bias: Tensor) -> tuple[Tensor]:
        record_call("kernel")
        y = (x.float() + bias.float()) if wide else x + bias
        return ((y - y.mean(0)).to(x.dtype) + wrong * bias,)

    return version


def bias_inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 8, generator=generator).to(torch.bfloat16).requires_grad_()
    return x, torch.zeros(8, dtype=torch.bfloat16).requires_grad_()


def test_a_gradient_of_rounding_errors_only_may_have_other_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    narrow, wide = bias_before_norm(wide=False), bias_before_norm(wide=True)
    record, _ = compare(narrow, wide, *bias_inputs())
    assert record.difference < 0.0625
    monkeypatch.setattr(accuracy, "GRADIENT_NOISE_FACTOR", 0.0)
    torch.manual_seed(0)
    with pytest.raises(AccuracyError, match="off by"):
        compare(narrow, wide, *bias_inputs())


def test_a_small_wrong_gradient_is_an_error() -> None:
    torch.manual_seed(0)
    right, wrong = bias_before_norm(wide=True), bias_before_norm(wide=True, wrong=0.01)
    with pytest.raises(AccuracyError, match="off by"):
        compare(right, wrong, *bias_inputs())


def test_a_missing_gradient_is_an_error() -> None:
    def candidate(x: Tensor) -> tuple[Tensor]:
        record_call("kernel")
        return (x.detach() * 2,)

    with pytest.raises(AccuracyError, match="no result has a gradient"):
        compare(lambda x: (x * 2,), candidate, torch.ones(3, requires_grad=True))


def test_a_candidate_without_kernels_is_an_error() -> None:
    with pytest.raises(NoStitchedKernel):
        compare(lambda x: (x,), lambda x: (x,), torch.ones(1))
