"""Clocks that time runs side by side: recorded samples, and the order of measured ones."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from nostall.core.errors import BadRun  # noqa: E402
from nostall.gpu import clock  # noqa: E402
from nostall.gpu.clock import RecordedClock, StepReplayClock, WallClock  # noqa: E402


def test_recorded_samples_are_returned_for_recorded_graphs_only() -> None:
    recorded = RecordedClock({"g": [[1.0], [2.0]]})
    assert recorded.samples("g", [int, int], 1.0) == [[1.0], [2.0]]
    with pytest.raises(BadRun, match="record it with this model"):
        recorded.samples("h", [int, int], 1.0)


def test_runs_are_timed_alternately_and_equally_often() -> None:
    order: list[str] = []
    runs = [lambda n=name: order.append(n) for name in "abc"]
    samples = WallClock().samples("g", runs, 1e-9)
    assert {len(times) for times in samples} == {12}
    assert len({order.count(name) for name in "abc"}) == 1


def test_each_sample_follows_a_run_of_the_same_function() -> None:
    """Otherwise the baseline, which is timed twice, would have warm caches more often."""
    last, cold = "", {"a": 0, "b": 0}
    taken = []

    def run(name: str) -> None:
        nonlocal last
        cold[name] += last != name
        last = name

    def timed(function: Any, times: int) -> float:
        before = sum(cold.values())
        function()
        taken.append(sum(cold.values()) - before)
        return 1e-3

    a, b = (lambda: run("a")), (lambda: run("b"))
    clock._sample_interleaved(timed, [a, b, a], 1e-9)
    assert len(taken) > 3 * clock.MIN_ROUNDS
    assert not any(taken[-3 * clock.MIN_ROUNDS :])


class Timeline:
    """A host that launches runs and a GPU that executes them in order, in seconds."""

    def __init__(self) -> None:
        self.host = self.gpu = 0.0

    def run(self, host: float, gpu: float) -> None:
        """Launch work of ``gpu`` seconds, for which the host needs ``host`` seconds."""
        self.host += host
        self.gpu = max(self.gpu, self.host) + gpu

    def synchronize(self) -> None:
        self.host = self.gpu = max(self.host, self.gpu)

    def event(self, **_: object) -> Any:
        line = self

        class Event:
            def record(self) -> None:
                self.time = max(line.gpu, line.host)

            def synchronize(self) -> None:
                line.synchronize()

            def elapsed_time(self, end: Any) -> float:
                return 1e3 * float(end.time - self.time)

        return Event()


@pytest.mark.parametrize(
    ("host", "gpu", "expected"), [(7e-4, 1e-3, 1e-3), (2e-3, 1e-3, 2e-3), (2e-5, 1e-5, 2e-5)]
)
def test_the_host_is_ahead_of_the_gpu_as_in_a_loop(
    host: float, gpu: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Timeline()
    monkeypatch.setattr("torch.cuda.Event", line.event)
    monkeypatch.setattr("torch.cuda.synchronize", line.synchronize)
    samples = clock.EventClock().samples("", [lambda: line.run(host, gpu)] * 2, 0.1)
    assert np.allclose(samples, expected, rtol=1e-6)


def test_a_sample_takes_about_the_wanted_time() -> None:
    repeats = []

    def timed(_: Any, times: int) -> float:
        repeats.append(times)
        return 2e-3

    clock._sample_interleaved(timed, [int, int, int], 1e-9, clock.LOOP_SECONDS)
    assert set(repeats[:3]) == {1}
    assert set(repeats[3:]) == {10}


@pytest.mark.parametrize("fails", [False, True])
def test_only_a_capture_has_a_random_state_of_its_own(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What other threads draw while a run is compiled is not drawn again."""
    generator, stream, graph = Mock(), Mock(), Mock()
    state = ["the user's"]
    generator.graphsafe_get_state = lambda: state[-1]
    generator.graphsafe_set_state = state.append
    generator.clone_state = lambda: f"a copy of {state[-1]}"
    stream.device.index = 0
    monkeypatch.setattr("torch.cuda.default_generators", [generator])
    monkeypatch.setattr("torch.cuda.Stream", lambda: stream)
    monkeypatch.setattr("torch.cuda.CUDAGraph", lambda: graph)
    for name in ("current_stream", "graph_pool_handle"):
        monkeypatch.setattr(f"torch.cuda.{name}", Mock())
    monkeypatch.setattr("torch.cuda.stream", lambda _: contextlib.nullcontext())
    seen: list[str] = []

    def run() -> None:
        seen.append(state[-1])
        if fails and len(seen) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        clock.capture(run, 1)
    assert seen == ["the user's", "a copy of the user's"]
    assert state[-1] == "the user's"
    graph.capture_end.assert_called_once()


def test_all_runs_are_captured_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each stream would keep the memory of its run before the capture."""
    streams: list[Any] = []

    def captured(run: Any, count: int, stream: Any) -> Any:
        streams.append(stream)
        return Mock()

    line = Timeline()
    monkeypatch.setattr(clock, "capture", captured)
    monkeypatch.setattr("torch.cuda.Stream", Mock)
    monkeypatch.setattr("torch.cuda.Event", line.event)
    monkeypatch.setattr("torch.cuda.synchronize", line.synchronize)
    assert len(clock.ReplayClock().samples("", [int, int, int], 1e-9)) == 3
    assert len(streams) == 3 and len({id(stream) for stream in streams}) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_replays_of_training_steps_are_timed_also_behind_a_failed_capture() -> None:
    weight = torch.randn(256, 256, device="cuda", requires_grad=True)
    x = torch.randn(256, 256, device="cuda")

    def step() -> object:
        dropped = torch.nn.functional.dropout(x @ weight, 0.1)
        return torch.autograd.grad(dropped.square().mean(), weight)

    def waits() -> object:
        return step(), float(weight.detach().sum())

    for _ in range(2):
        with pytest.raises(RuntimeError):
            StepReplayClock().samples("g", [waits] * 3, 0.05)
        rows = StepReplayClock().samples("g", [step] * 3, 0.05)
        assert len(rows) == 3 and all(0 < each < 1e-2 for row in rows for each in row)
    before = torch.cuda.memory_allocated()
    assert torch.isfinite(step()[0]).all()  # type: ignore[index]
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == before
