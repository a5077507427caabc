"""When a graph runs which version: comparisons, steps, ranks, failures.  Nothing is compiled."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from nostall.attach.torch_compile import training_steps  # noqa: E402
from nostall.attach.torch_compile.measure import accuracy  # noqa: E402
from nostall.attach.torch_compile.measure.accuracy import Differs  # noqa: E402
from nostall.attach.torch_compile.measure.call import Call  # noqa: E402
from nostall.attach.torch_compile.measure.graph_comparison import NotStitched, judge  # noqa: E402
from nostall.attach.torch_compile.measure.kernel_comparison import AllSlower  # noqa: E402
from nostall.attach.torch_compile.report import GraphReport  # noqa: E402
from nostall.attach.torch_compile.rewrite.kernel_selection import Stitching  # noqa: E402
from nostall.attach.torch_compile.runtime.custom_op import note, observed  # noqa: E402
from nostall.attach.torch_compile.selection import dispatcher  # noqa: E402
from nostall.attach.torch_compile.selection.dispatcher import Candidate, Rules, Switch  # noqa: E402
from nostall.attach.torch_compile.store.kernel_store import Kept  # noqa: E402
from nostall.attach.torch_compile.store.rank_sync import Chosen, Ranks  # noqa: E402
from nostall.attach.torch_compile.store.records import ChoiceRecord, RegionRecord  # noqa: E402
from nostall.attach.torch_compile.store.regions import region_key, stitched_region  # noqa: E402
from nostall.attach.torch_compile.workers.tasks import Preparation, Task  # noqa: E402
from nostall.gpu.clock import RecordedClock  # noqa: E402
from tests.unit.fusion.patterns import layer_norm  # noqa: E402

FASTER = RecordedClock({"*": [[2.0] * 12, [1.0] * 12, [2.0] * 12]})
SAME = RecordedClock({"*": [[1.0] * 12, [1.0] * 12, [1.0] * 12]})
SLOWER = RecordedClock({"*": [[1.0] * 12, [2.0] * 12, [1.0] * 12]})
GRAPH = "a" * 64
REGION = RegionRecord(steps=(), refused={"too wide": 1})


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No other graph of this process is undecided."""
    empty = training_steps.Steps()
    monkeypatch.setattr(dispatcher, "STEPS", empty)
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))


class Versions:
    """A plain and a stitched version that count their calls outside of comparisons."""

    def __init__(self, gain: float = 0.0) -> None:
        self.ran: list[str] = []
        self.gain = gain

    def plain(self, x: Tensor) -> tuple[Tensor]:
        self.ran.append("plain")
        return (x.exp(),)

    def stitched(self, x: Tensor) -> tuple[Tensor]:
        self.ran.append("stitched")
        note("kernel")
        return (x.exp() * (1 + self.gain),)


def made(
    versions: Versions,
    clock: Any = FASTER,
    make: Callable[[Any, Any], Candidate] | None = None,
    preparation: Preparation | None = None,
) -> Switch:
    found = make or (lambda args, chosen: Candidate(versions.stitched, Stitching(["kernel"])))
    rules = Rules(GRAPH, Kept(), clock, 0.1, preparation or Preparation(), {})
    return Switch(versions.plain, found, rules, GraphReport(GRAPH))


def calls(graph: Switch, versions: Versions, count: int) -> list[str]:
    """Which version each call ran: the last one, as comparisons go before."""
    found = []
    for _ in range(count):
        graph(torch.ones(3))
        found.append(versions.ran[-1])
    return found


def test_a_faster_version_runs_from_the_second_call_on_and_is_kept() -> None:
    versions = Versions()
    graph = made(versions)
    assert calls(graph, versions, 3) == ["plain", "stitched", "stitched"]
    choice = Kept().answer(ChoiceRecord, GRAPH)
    assert choice is not None
    assert (choice.version, choice.kernels) == ("stitched", ("kernel",))
    assert choice.compared is not None
    assert choice.compared.inductor == (2.0,) * 12


@pytest.mark.parametrize("clock", [SAME, SLOWER])
def test_without_a_gain_beyond_the_noise_nothing_changes(clock: RecordedClock) -> None:
    versions = Versions()
    graph = made(versions, clock)
    assert calls(graph, versions, 3) == ["plain"] * 3
    choice = Kept().answer(ChoiceRecord, GRAPH)
    assert choice is not None
    assert choice.version == "inductor"


def test_wrong_results_are_never_used_however_fast(caplog: pytest.LogCaptureFixture) -> None:
    versions = Versions(gain=0.01)
    graph = made(versions)
    with caplog.at_level(logging.WARNING, "nostall"):
        assert calls(graph, versions, 3) == ["plain"] * 3
    assert [r.message for r in caplog.records if "off by" in r.message]
    assert Kept().answer(ChoiceRecord, GRAPH) is None


def test_a_failure_is_said_once_and_inductors_version_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(args: Any, chosen: Any) -> Candidate:
        raise RuntimeError("no luck\nwith many lines")

    versions = Versions()
    graph = made(versions, make=fails)
    with caplog.at_level(logging.WARNING, "nostall"):
        assert calls(graph, versions, 4) == ["plain"] * 4
    (record,) = caplog.records
    assert "not stitched: RuntimeError: no luck" in record.message
    assert "\n" not in record.message
    assert graph.report.state == "inductor"


def test_a_version_without_kernels_is_not_timed() -> None:
    versions = Versions()
    graph = made(versions, make=lambda args, chosen: Candidate(versions.plain, Stitching()))
    assert calls(graph, versions, 3) == ["plain"] * 3
    assert graph.report.reason == "nothing to stitch"


def test_while_regions_are_stitched_in_the_background_inductors_version_runs() -> None:
    versions, preparation, go = Versions(), Preparation(), threading.Event()
    graph = made(versions, preparation=preparation)
    began = threading.Event()
    preparation.add(lambda: [lambda: began.set() or (go.wait(30) and None)])
    assert calls(graph, versions, 1) == ["plain"]
    assert not began.wait(0.05), "the first step is Inductor's alone"
    assert calls(graph, versions, 2) == ["plain"] * 2
    assert began.wait(30)
    go.set()
    while not preparation.ready:
        time.sleep(0.001)
    assert calls(graph, versions, 1) == ["stitched"]
    assert graph.report.seconds["background"] > 0


def done(preparation: Preparation) -> None:
    preparation.start()
    while not preparation.ready:
        time.sleep(0.001)


def test_a_failure_in_the_background_is_said_and_costs_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ran = []

    def fails() -> None:
        raise RuntimeError("no luck")

    def finds() -> Iterator[Task]:
        yield fails
        yield lambda: ran.append("task")
        raise RuntimeError("no idea")

    preparation = Preparation()
    with caplog.at_level(logging.WARNING, "nostall"):
        preparation.add(finds)
        preparation.add(lambda: [lambda: ran.append("work")])
        done(preparation)
    assert sorted(ran) == ["task", "work"]
    said = [r.message for r in caplog.records]
    assert [sum(what in one for one in said) for what in ("no luck", "no idea")] == [1, 1]


def test_all_that_there_is_to_do_is_found_before_something_is_done() -> None:
    """Who waits for what is found need not wait for more."""
    found, go, last = [], threading.Event(), threading.Event()
    preparation = Preparation()
    for name in ("one", "other"):
        preparation.add(lambda name=name: found.append(name) or [lambda: go.wait(30)])
    preparation.add_last(last.set)
    preparation.start()
    assert last.wait(30)
    assert found == ["one", "other"] and not preparation.ready
    go.set()
    done(preparation)


def test_where_no_thread_can_be_started_inductors_version_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    versions, preparation = Versions(), Preparation()
    graph = made(versions, preparation=preparation)
    preparation.add(list)
    monkeypatch.setattr(threading.Thread, "start", start)
    with caplog.at_level(logging.WARNING, "nostall"):
        assert calls(graph, versions, 3) == ["plain"] * 3
    assert "can't start new thread" in caplog.text


def test_all_processor_time_of_tasks_counts() -> None:
    def task() -> None:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass

    preparation = Preparation()
    preparation.add(lambda: [task] * 3)
    done(preparation)
    assert 3 * 0.05 <= preparation.cpu_seconds <= 1.5 * preparation.seconds


ENDS = """
import sys, threading, time
from nostall.attach.torch_compile.workers import tasks as background
begun = threading.Event()
def task():
    begun.set()
    time.sleep(0.5)
    print("ended", flush=True)
preparation = background.Preparation()
preparation.add(lambda: [task] * 50)
preparation.start()
begun.wait()
"""


def test_a_program_ends_behind_the_compilation_that_has_begun_and_begins_no_other() -> None:
    """A thread that comes back from C++ when the interpreter is gone aborts the process."""
    began = time.monotonic()
    ran = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("ended") == 1
    assert time.monotonic() - began < 50 * 0.5


def test_nothing_is_swapped_while_a_backward_pass_is_pending() -> None:
    versions = Versions()
    graph = made(versions)
    x = torch.ones(3, requires_grad=True)
    (first,) = graph(x)
    (second,) = graph(x)
    assert versions.ran == ["plain", "plain"]
    first.sum().backward()
    (third,) = graph(x)
    assert versions.ran == ["plain"] * 3
    second.sum().backward()
    third.sum().backward()
    assert x.grad is not None
    before = x.grad.clone()
    graph(x)
    assert versions.ran[-1] == "stitched"
    assert torch.equal(x.grad, before), "a comparison must not reach the user's gradients"


class Aliased(Versions):
    """Whose first result is a view of the input, which AOTAutograd makes anew behind its node."""

    def plain(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return x.view(-1), *compiled(super().plain, x)

    def stitched(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return x.view(-1), *compiled(super().stitched, x)


class CompiledFunction(torch.autograd.Function):
    """Named as AOTAutograd's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        return given[0] * ctx.saved_tensors[0], None


def compiled(run: Callable[[Tensor], tuple[Tensor]], x: Tensor) -> tuple[Tensor]:
    return (CompiledFunction.apply(x, run(x.detach())[0]),)


def test_pytorch_calls_the_node_of_a_compiled_function_so() -> None:
    result = torch.compile(lambda x: x.exp() + 1, backend="aot_eager")(
        torch.ones(3).requires_grad_()
    )
    assert type(result.grad_fn).__name__ == training_steps.COMPILED


@pytest.mark.parametrize("keeps_view", [False, True])
def test_views_of_inputs_are_no_backward_pass_of_the_graph(keeps_view: bool) -> None:
    versions = Aliased()
    graph = made(versions)
    x = torch.ones(3, requires_grad=True)
    kept = []
    view, first = graph(x)
    kept += [view] * keeps_view
    del view
    graph(x)
    assert versions.ran == ["plain", "plain"], "the first result waits for its backward pass"
    first.sum().backward()
    graph(x)
    graph(x)
    assert versions.ran[-1] == "stitched"


class Terminal(io.StringIO):
    def __init__(self, is_one: bool) -> None:
        super().__init__()
        self.is_one = is_one

    def isatty(self) -> bool:
        return self.is_one


def test_progress_is_one_line_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_one in (True, False):
        monkeypatch.setattr("sys.stderr", stream := Terminal(is_one))
        graph = made(versions := Versions())
        calls(graph, versions, 3)
        said = stream.getvalue()
        assert said.count("\n") == is_one
        assert ("comparing" in said and "stitched" in said.rpartition("\r")[2]) == is_one


def test_comparisons_take_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr("time.thread_time", lambda: float(next(now)))
    graph = made(versions := Versions())
    calls(graph, versions, 3)
    assert graph.report.state == "stitched"
    assert graph.report.cpu_seconds == 2.0, "one for compiling, one for comparing"


def test_what_pytorch_asks_while_it_traces_is_no_call() -> None:
    """It does where it splits graphs for DistributedDataParallel: nothing runs backward then."""
    from torch._subclasses import FakeTensorMode

    versions = Versions()
    graph = made(versions)
    with FakeTensorMode() as mode:
        graph(mode.from_tensor(torch.ones(3, requires_grad=True)))
    assert graph.report.calls == 0
    assert dispatcher.STEPS.quiet
    assert calls(graph, versions, 3) == ["plain", "stitched", "stitched"]


def test_observers_may_be_nested() -> None:
    with observed() as outer:
        with observed() as inner:
            pass
        note("kernel")
    assert (outer, inner) == ({"kernel"}, set())


def test_a_result_that_is_dropped_is_no_pending_backward_pass() -> None:
    versions = Versions()
    graph = made(versions)
    x = torch.ones(3, requires_grad=True)
    graph(x)
    graph(x)
    assert versions.ran[-1] == "stitched"


def test_a_program_that_keeps_graphs_keeps_inductors_version() -> None:
    versions = Versions()
    graph = made(versions)
    x = torch.ones(3, requires_grad=True)
    for _ in range(3):
        (result,) = graph(x)
        result.sum().backward(retain_graph=True)
        result.sum().backward()
    assert versions.ran == ["plain"] * 3
    assert "retain_graph" in graph.report.reason


def test_a_captured_cuda_graph_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = Versions()
    graph = made(versions)
    monkeypatch.setattr(dispatcher, "capturing", lambda: True)
    monkeypatch.setattr(training_steps, "capturing", lambda: True)
    assert calls(graph, versions, 4) == ["plain"] * 4
    assert graph.report.calls == 0


def test_where_no_kernel_is_faster_inductors_version_is_kept() -> None:
    def none(args: Any, chosen: Any) -> Candidate:
        raise AllSlower("every kernel is slower")

    versions = Versions()
    graph = made(versions, make=none)
    assert calls(graph, versions, 3) == ["plain"] * 3
    choice = Kept().answer(ChoiceRecord, GRAPH)
    assert choice is not None
    assert (choice.version, choice.reason) == ("inductor", "every kernel is slower")


def test_what_is_left_to_inductor_is_part_of_the_choice() -> None:
    versions, asked = Versions(), []

    def make(args: Any, chosen: Any) -> Candidate:
        asked.append(chosen)
        found = Chosen("stitched", frozenset({"b", "a"}), {"region": REGION})
        return Candidate(versions.stitched, Stitching(["kernel"]), found)

    graph = made(versions, make=make)
    assert calls(graph, versions, 2)[-1] == "stitched"
    assert asked == [None]
    choice = Kept().answer(ChoiceRecord, GRAPH)
    assert choice is not None
    assert choice.left == ("a", "b")
    assert choice.regions == {"region": REGION}


def test_ranks_leave_to_inductor_what_rank_0_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    store, versions, asked = torch.distributed.HashStore(), Versions(), []

    def make(args: Any, chosen: Any) -> Candidate:
        asked.append(chosen)
        return Candidate(versions.stitched, Stitching(["kernel"]), chosen)

    monkeypatch.setattr(Ranks, "here", classmethod(lambda cls: cls(store, 1)))
    graph = made(versions, make=make)
    assert calls(graph, versions, 3) == ["plain"] * 3
    assert asked == [], "nothing is compiled before it is known what"
    chosen = Chosen("stitched", frozenset({"a", "b"}), {"region": REGION})
    Ranks(store, 0).publish(GRAPH, chosen, Kept())
    assert calls(graph, versions, 1) == ["stitched"]
    assert asked == [chosen]


def test_kernels_come_with_the_choice_of_rank_0(tmp_path: Path) -> None:
    graph = layer_norm((4, 24), "float32")
    one, other = Kept(tmp_path / "one"), Kept(tmp_path / "other")
    region = stitched_region(graph, one)
    chosen = Chosen("stitched", frozenset(), {region_key(graph): region})
    store = torch.distributed.HashStore()
    Ranks(store, 0).publish(GRAPH, chosen, one)
    assert Ranks(store, 1).chosen(GRAPH, other) == chosen
    assert region.steps
    for step in region.steps:
        assert other.kernel(step.kernel) == one.kernel(step.kernel)


def test_a_choice_of_rank_0_that_is_not_understood_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, versions = torch.distributed.HashStore(), Versions()
    monkeypatch.setattr(Ranks, "here", classmethod(lambda cls: cls(store, 1)))
    graph = made(versions)
    store.set(GRAPH, b"stitched")
    with caplog.at_level(logging.WARNING, "nostall"):
        assert calls(graph, versions, 4) == ["plain"] * 4
    (record,) = caplog.records
    assert "the choice of rank 0 is not understood" in record.message


def test_ranks_compile_nothing_where_rank_0_stays_with_inductor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make(args: Any, chosen: Any) -> Candidate:
        raise AssertionError("compiled for nothing")

    store, versions = torch.distributed.HashStore(), Versions()
    monkeypatch.setattr(Ranks, "here", classmethod(lambda cls: cls(store, 1)))
    graph = made(versions, make=make)
    Ranks(store, 0).publish(GRAPH, Chosen("inductor"), Kept())
    assert calls(graph, versions, 3) == ["plain"] * 3
    assert (graph.report.state, graph.report.reason) == ("inductor", "rank 0 has chosen")


def test_ranks_follow_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.HashStore()
    leader, follower = Versions(), Versions()
    one, other = made(leader), made(follower)
    monkeypatch.setattr(Ranks, "here", classmethod(lambda cls: cls(store, 1)))
    assert calls(other, follower, 3) == ["plain"] * 3
    monkeypatch.setattr(Ranks, "here", classmethod(lambda cls: cls(store, 0)))
    assert calls(one, leader, 2)[-1] == "stitched"
    monkeypatch.setattr(Ranks, "here", classmethod(lambda cls: cls(store, 1)))
    assert calls(other, follower, 2)[-1] == "stitched"
    assert other.report.reason == "rank 0 has chosen"
    assert other.report.compared is None


# -- the comparison itself -------------------------------------------------------------------------


class Noisy:
    """A clock that hears little at first: samples by how long it may take."""

    name, kind = "noisy", "measured"

    def __init__(self, first: list[float], longer: list[float]) -> None:
        self.first, self.longer, self.asked = first, longer, list[float]()

    def samples(self, graph: str, runs: Any, seconds: float) -> list[list[float]]:
        self.asked.append(seconds)
        stitched = self.first if len(self.asked) == 1 else self.longer
        return [[1.0] * 12, stitched, [1.0] * 12]


@pytest.mark.parametrize(
    ("first", "longer", "asked", "verdict"),
    [
        ([0.9, 1.05] * 6, [0.95] * 12, [0.1, 0.4], "faster"),
        ([0.9, 1.05] * 6, [1.0] * 12, [0.1, 0.4], "same"),
        ([0.95] * 12, [], [0.1], "faster"),
        ([1.05] * 12, [], [0.1], "slower"),
    ],
)
def test_what_the_noise_hides_is_measured_longer_once(
    first: list[float], longer: list[float], asked: list[float], verdict: str
) -> None:
    """The second samples alone decide."""

    def version(x: Tensor) -> tuple[Tensor]:
        note("kernel")
        return (x,)

    clock = Noisy(first, longer)
    call = Call.of([torch.ones(3)], frozenset())
    found, _ = judge(GRAPH, version, version, call, clock, 0.1)
    assert clock.asked == pytest.approx(asked)
    assert found.comparison().verdict == verdict
    assert list(found.stitched) == (longer or first)


def test_arguments_changed_in_place_are_copies_in_a_comparison() -> None:
    state = torch.zeros(3)

    def version(x: Tensor, s: Tensor) -> tuple[Tensor]:
        note("kernel")
        s.add_(1)
        return (x + s,)

    call = Call.of([torch.ones(3), state], frozenset({1}))
    judge(GRAPH, version, version, call, SAME, 0.1)
    assert state.tolist() == [0.0, 0.0, 0.0]


def test_a_comparison_draws_equal_random_numbers_and_gives_them_back() -> None:
    def version(x: Tensor) -> tuple[Tensor]:
        note("kernel")
        return (x * torch.rand_like(x),)

    torch.manual_seed(3)
    before = torch.get_rng_state()
    found, _ = judge(GRAPH, version, version, Call.of([torch.ones(3)], frozenset()), SAME, 0.1)
    assert found.difference == 0.0
    assert torch.equal(before, torch.get_rng_state())


def other_strides(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def other_nan(x: Tensor) -> Tensor:
    return torch.where(x == 0, torch.nan, x)


def same_nan(x: Tensor) -> Tensor:
    return x / x * x


@pytest.mark.parametrize(
    ("change", "why"),
    [(other_strides, "strides"), (other_nan, "off by"), (lambda x: x.double(), "float64")],
)
def test_what_differs_is_refused(change: Callable[[Tensor], Tensor], why: str) -> None:
    def stitched(x: Tensor) -> tuple[Tensor]:
        note("kernel")
        return (change(x),)

    x = torch.arange(12.0).view(3, 4)
    with pytest.raises(Differs, match=why):
        judge(GRAPH, lambda x: (x,), stitched, Call.of([x], frozenset()), SAME, 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_wrong_element_of_many_is_refused(dtype: torch.dtype) -> None:
    """It disappears in the norm of the whole."""

    def one_wrong(x: Tensor) -> tuple[Tensor]:
        note("kernel")
        y = x.clone()
        y[777, 3] += 1
        return (y,)

    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(1)).to(dtype)
    with pytest.raises(Differs, match="is off by"):
        judge(GRAPH, lambda x: (x,), one_wrong, Call.of([x], frozenset()), SAME, 0.1)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_bytes_round_the_other_way_at_some_elements_and_are_no_other_numbers(
    dtype: torch.dtype,
) -> None:
    wide = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))

    def difference(other: Tensor) -> float:
        def stitched(x: Tensor) -> tuple[Tensor]:
            note("kernel")
            return (other.to(dtype),)

        call = Call.of([wide], frozenset())
        return judge(GRAPH, lambda x: (x.to(dtype),), stitched, call, SAME, 0.1)[0].difference

    assert 0 < difference(wide * (1 + 2**-11)) < 0.03
    for other in (torch.zeros_like(wide), -wide, wide.flip(0), wide * 1.5):
        with pytest.raises(Differs, match="off by"):
            difference(other)


def test_roundings_at_every_element_are_allowed() -> None:
    def rounded(x: Tensor) -> tuple[Tensor]:
        note("kernel")
        return ((x.float() * (1 + 2**-8)).to(x.dtype),)

    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    found, _ = judge(GRAPH, lambda x: (x,), rounded, Call.of([x], frozenset()), SAME, 0.1)
    assert 0 < found.difference < 0.01


def test_equal_nans_are_equal() -> None:
    def version(x: Tensor) -> tuple[Tensor]:
        note("kernel")
        return (same_nan(x),)

    call = Call.of([torch.arange(4.0)], frozenset())
    found, called = judge(GRAPH, version, version, call, SAME, 0.1)
    assert found.difference == 0.0
    assert called == ("kernel",)


def before_a_norm(wide: bool, wrong: float = 0.0) -> Callable[..., tuple[Tensor]]:
    """A bias whose gradient is 0 but for rounding, in bf16 or wider."""

    def version(x: Tensor, bias: Tensor) -> tuple[Tensor]:
        note("kernel")
        y = (x.float() + bias.float()) if wide else x + bias
        return ((y - y.mean(0)).to(x.dtype) + wrong * bias,)

    return version


def bias_call() -> Call:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(64, 8, generator=draw).to(torch.bfloat16).requires_grad_()
    return Call.of([x, torch.zeros(8, dtype=torch.bfloat16).requires_grad_()], frozenset())


def test_a_gradient_of_nothing_but_roundings_may_have_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    one, other = before_a_norm(wide=False), before_a_norm(wide=True)
    found, _ = judge(GRAPH, one, other, bias_call(), SAME, 0.1)
    assert found.difference < 0.0625
    monkeypatch.setattr(accuracy, "NUDGES", 0.0)
    torch.manual_seed(0)
    with pytest.raises(Differs, match="off by"):
        judge(GRAPH, one, other, bias_call(), SAME, 0.1)


def test_a_small_gradient_that_is_wrong_is_refused() -> None:
    torch.manual_seed(0)
    one, other = before_a_norm(wide=True), before_a_norm(wide=True, wrong=0.01)
    with pytest.raises(Differs, match="off by"):
        judge(GRAPH, one, other, bias_call(), SAME, 0.1)


def test_a_missing_gradient_is_refused() -> None:
    def stitched(x: Tensor) -> tuple[Tensor]:
        note("kernel")
        return (x.detach() * 2,)

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(Differs, match="no result has a gradient"):
        judge(GRAPH, lambda x: (x * 2,), stitched, Call.of([x], frozenset()), SAME, 0.1)


def test_no_kernel_means_nothing_to_compare() -> None:
    with pytest.raises(NotStitched):
        judge(GRAPH, lambda x: (x,), lambda x: (x,), Call.of([torch.ones(1)], frozenset()), SAME, 1)


@pytest.fixture(autouse=True)
def quiet_threads() -> Iterator[None]:
    yield
    torch.set_grad_enabled(True)
