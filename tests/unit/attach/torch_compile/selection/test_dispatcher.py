"""Which version of a graph runs at which call: comparisons, steps, ranks, failures.

Nothing is compiled.
"""

from __future__ import annotations

import io
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from nostall.attach.torch_compile import training_steps  # noqa: E402
from nostall.attach.torch_compile.measure.kernel_comparison import AllKernelsSlower  # noqa: E402
from nostall.attach.torch_compile.rewrite.kernel_selection import RewriteResult  # noqa: E402
from nostall.attach.torch_compile.selection import dispatcher  # noqa: E402
from nostall.attach.torch_compile.selection.graph_state import Phase  # noqa: E402
from nostall.attach.torch_compile.selection.versions import Candidate  # noqa: E402
from nostall.attach.torch_compile.store.rank_sync import Selection  # noqa: E402
from nostall.attach.torch_compile.workers.tasks import BackgroundTasks  # noqa: E402
from nostall.gpu.clock import RecordedClock  # noqa: E402
from tests.unit.attach.torch_compile.selection.dispatching import (  # noqa: E402
    REGION,
    SAME,
    SLOWER,
    Versions,
    call,
    dispatch,
    stored,
)

pytestmark = pytest.mark.usefixtures("steps")


def test_a_faster_candidate_runs_from_the_second_call_on_and_is_stored() -> None:
    versions = Versions()
    graph = dispatch(versions)
    assert call(graph, versions, 3) == ["baseline", "candidate", "candidate"]
    record = stored()
    assert record is not None
    assert (record.version, record.kernels) == ("stitched", ("kernel",))
    assert record.comparison is not None
    assert record.comparison.inductor == (2.0,) * 12


def test_a_graph_that_is_not_called_again_does_not_keep_steps_tracked() -> None:
    """Dynamo compiles a function again if a guard fails behind the first step."""
    versions, later = Versions(), Versions()
    first = dispatch(versions)
    assert call(first, versions, 1) == ["baseline"]
    second = dispatch(later)
    assert call(second, later, 1) == ["baseline"] and dispatcher.STEPS.is_active
    assert call(second, later, 2) == ["candidate"] * 2
    assert not dispatcher.STEPS.is_active
    assert call(first, versions, 2) == ["candidate"] * 2, "it goes on if it is called again"


@pytest.mark.parametrize("clock", [SAME, SLOWER])
def test_a_candidate_without_gain_beyond_the_noise_is_not_used(clock: RecordedClock) -> None:
    versions = Versions()
    graph = dispatch(versions, clock)
    assert call(graph, versions, 3) == ["baseline"] * 3
    record = stored()
    assert record is not None
    assert record.version == "inductor"


def test_a_candidate_with_wrong_results_is_not_used_even_if_it_is_faster(
    caplog: pytest.LogCaptureFixture,
) -> None:
    versions = Versions(relative_error=0.01)
    graph = dispatch(versions)
    with caplog.at_level(logging.WARNING, "nostall"):
        assert call(graph, versions, 3) == ["baseline"] * 3
    assert [r.message for r in caplog.records if "off by" in r.message]
    assert stored() is None


def test_a_failure_is_logged_once_and_inductors_version_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(args: Any, selection: Any) -> Candidate:
        raise RuntimeError("no luck\nwith many lines")

    versions = Versions()
    graph = dispatch(versions, build=fail)
    with caplog.at_level(logging.WARNING, "nostall"):
        assert call(graph, versions, 4) == ["baseline"] * 4
    (record,) = caplog.records
    assert "not stitched: RuntimeError: no luck" in record.message
    assert "\n" not in record.message
    assert graph.report.state == "inductor"


def test_a_candidate_without_kernels_is_not_timed() -> None:
    versions = Versions()
    empty = Candidate(versions.baseline, RewriteResult())
    graph = dispatch(versions, build=lambda args, selection: empty)
    assert call(graph, versions, 3) == ["baseline"] * 3
    assert graph.report.reason == "nothing to stitch"


def test_inductors_version_runs_while_background_tasks_run() -> None:
    versions, tasks, go = Versions(), BackgroundTasks(), threading.Event()
    graph = dispatch(versions, tasks=tasks)
    began = threading.Event()
    tasks.add(lambda: [lambda: began.set() or (go.wait(30) and None)])
    assert call(graph, versions, 1) == ["baseline"]
    assert not began.wait(0.05), "nothing runs beside the first step"
    assert graph._state.phase is Phase.OBSERVED
    assert call(graph, versions, 2) == ["baseline"] * 2
    assert graph._state.phase is Phase.PREPARING
    assert began.wait(30)
    go.set()
    while not tasks.is_ready:
        time.sleep(0.001)
    assert call(graph, versions, 1) == ["candidate"]
    assert graph._state.phase is Phase.DECIDED
    assert graph.report.seconds["background"] > 0


def test_if_no_thread_can_be_started_inductors_version_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    versions, tasks = Versions(), BackgroundTasks()
    graph = dispatch(versions, tasks=tasks)
    tasks.add(list)
    monkeypatch.setattr(threading.Thread, "start", start)
    with caplog.at_level(logging.WARNING, "nostall"):
        assert call(graph, versions, 3) == ["baseline"] * 3
    assert "can't start new thread" in caplog.text


def test_versions_are_not_exchanged_while_a_backward_pass_is_pending() -> None:
    versions = Versions()
    graph = dispatch(versions)
    x = torch.ones(3, requires_grad=True)
    (first,) = graph(x)
    (second,) = graph(x)
    assert versions.ran == ["baseline", "baseline"]
    first.sum().backward()
    (third,) = graph(x)
    assert versions.ran == ["baseline"] * 3
    assert graph._state.phase is Phase.CANDIDATE
    second.sum().backward()
    third.sum().backward()
    assert x.grad is not None
    before = x.grad.clone()
    graph(x)
    assert versions.ran[-1] == "candidate"
    assert torch.equal(x.grad, before), "a comparison must not change the user's gradients"


class CompiledFunction(torch.autograd.Function):
    """An autograd function with the name of AOTAutograd's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.saved_tensors[0], None


class AliasingVersions(Versions):
    """Versions whose first result is a view of the input, with its own autograd node.

    AOTAutograd creates such views outside of the compiled function.
    """

    def baseline(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return x.view(-1), *apply_compiled(super().baseline, x)

    def candidate(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return x.view(-1), *apply_compiled(super().candidate, x)


def apply_compiled(run: Callable[[Tensor], tuple[Tensor]], x: Tensor) -> tuple[Tensor]:
    return (CompiledFunction.apply(x, run(x.detach())[0]),)


def test_autograd_nodes_of_compiled_functions_have_the_expected_name() -> None:
    result = torch.compile(lambda x: x.exp() + 1, backend="aot_eager")(
        torch.ones(3).requires_grad_()
    )
    assert type(result.grad_fn).__name__ == training_steps.COMPILED_NODE


@pytest.mark.parametrize("keeps_view", [False, True])
def test_views_of_inputs_are_no_backward_passes_of_the_graph(keeps_view: bool) -> None:
    versions = AliasingVersions()
    graph = dispatch(versions)
    x = torch.ones(3, requires_grad=True)
    kept = []
    view, first = graph(x)
    kept += [view] * keeps_view
    del view
    graph(x)
    assert versions.ran == ["baseline", "baseline"], "the first backward pass is pending"
    first.sum().backward()
    graph(x)
    graph(x)
    assert versions.ran[-1] == "candidate"


class Terminal(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_one_line_and_only_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setattr("sys.stderr", stream := Terminal(is_terminal))
    graph = dispatch(versions := Versions())
    call(graph, versions, 3)
    text = stream.getvalue()
    assert text.count("\n") == is_terminal
    assert ("comparing" in text and "stitched" in text.rpartition("\r")[2]) == is_terminal


def test_cpu_time_of_compiling_and_comparing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr("time.thread_time", lambda: float(next(now)))
    graph = dispatch(versions := Versions())
    call(graph, versions, 3)
    assert graph.report.state == "stitched"
    assert graph.report.cpu_seconds == 2.0, "one second for compiling, one for comparing"


def test_tracing_by_pytorch_is_not_counted_as_a_call() -> None:
    """PyTorch traces parts of a graph for DistributedDataParallel; no backward pass follows."""
    from torch._subclasses import FakeTensorMode

    versions = Versions()
    graph = dispatch(versions)
    with FakeTensorMode() as mode:
        graph(mode.from_tensor(torch.ones(3, requires_grad=True)))
    assert graph.report.calls == 0
    assert dispatcher.STEPS.between_steps
    assert call(graph, versions, 3) == ["baseline", "candidate", "candidate"]


def test_the_backward_pass_of_a_dropped_result_is_not_pending() -> None:
    versions = Versions()
    graph = dispatch(versions)
    x = torch.ones(3, requires_grad=True)
    graph(x)
    graph(x)
    assert versions.ran[-1] == "candidate"


def test_with_retain_graph_inductors_version_stays() -> None:
    versions = Versions()
    graph = dispatch(versions)
    x = torch.ones(3, requires_grad=True)
    for _ in range(3):
        (result,) = graph(x)
        result.sum().backward(retain_graph=True)
        result.sum().backward()
    assert versions.ran == ["baseline"] * 3
    assert "retain_graph" in graph.report.reason


def test_nothing_happens_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = Versions()
    graph = dispatch(versions)
    monkeypatch.setattr(dispatcher, "is_capturing", lambda: True)
    monkeypatch.setattr(training_steps, "is_capturing", lambda: True)
    assert call(graph, versions, 4) == ["baseline"] * 4
    assert graph.report.calls == 0


def test_if_all_kernels_are_slower_inductors_version_is_stored() -> None:
    def build(args: Any, selection: Any) -> Candidate:
        raise AllKernelsSlower("every kernel is slower")

    versions = Versions()
    graph = dispatch(versions, build=build)
    assert call(graph, versions, 3) == ["baseline"] * 3
    record = stored()
    assert record is not None
    assert (record.version, record.reason) == ("inductor", "every kernel is slower")


def test_the_stored_selection_contains_the_kernels_that_stay_with_inductor() -> None:
    versions, selections = Versions(), []

    def build(args: Any, selection: Any) -> Candidate:
        selections.append(selection)
        measured = Selection("stitched", frozenset({"b", "a"}), {"region": REGION})
        return Candidate(versions.candidate, RewriteResult(["kernel"]), measured)

    graph = dispatch(versions, build=build)
    assert call(graph, versions, 2)[-1] == "candidate"
    assert selections == [None]
    record = stored()
    assert record is not None
    assert record.kept_in_inductor == ("a", "b")
    assert record.regions == {"region": REGION}


def test_a_program_that_keeps_results_but_runs_no_backward_pass_is_decided() -> None:
    """A loop without ``no_grad`` holds the last result while it calls the model again."""
    versions = Versions()
    graph, ran = dispatch(versions), list[str]()
    result: Any = None
    for _ in range(training_steps.MOST_UNUSED + 3):
        result = graph(torch.ones(3, requires_grad=True))
        ran.append(versions.ran[-1])
    assert result is not None and ran[training_steps.MOST_UNUSED - 1] == "baseline"
    assert ran[-1] == "candidate"
