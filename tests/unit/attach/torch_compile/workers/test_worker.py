"""What another process compiles: what it is told, and what happens where it cannot."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from functorch.compile import make_boxed_func  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._inductor import config  # noqa: E402

from nostall.attach.torch_compile.graph_copies import apart  # noqa: E402
from nostall.attach.torch_compile.report import GraphReport  # noqa: E402
from nostall.attach.torch_compile.rewrite.compilers import EagerHost, InductorHost, inductor_patches  # noqa: E402
from nostall.attach.torch_compile.rewrite.kernel_selection import Selection  # noqa: E402
from nostall.attach.torch_compile.selection.precompile import Ahead  # noqa: E402
from nostall.attach.torch_compile.workers import torch_state, worker_main  # noqa: E402
from nostall.attach.torch_compile.workers import worker as helping  # noqa: E402
from nostall.attach.torch_compile.workers.compile_job import Errand, layouts  # noqa: E402
from nostall.attach.torch_compile.workers.tasks import Preparation  # noqa: E402
from nostall.attach.torch_compile.workers.torch_state import Surroundings, Unsent  # noqa: E402
from nostall.attach.torch_compile.workers.worker import HELPER, Answer, Helper  # noqa: E402

LISTENS = """
import pickle, sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
connection.recv_bytes()  # the GPU that it may use
"""


@pytest.fixture
def helper() -> Iterator[Helper]:
    found = Helper("torch")
    yield found
    found.end()


def errand(size: int = 0) -> Errand:
    """Of at least so many bytes."""
    graph = torch.fx.symbolic_trace(nn.ReLU())
    graph.ballast = bytes(size)
    return Errand(graph, layouts([torch.ones(3)]), {}, None)


def seen(function: Callable[..., Any], *inputs: Tensor) -> list[Any]:
    """The graphs and inputs that Dynamo hands over."""
    found: list[Any] = []

    def backend(module: Any, given: Any) -> Any:
        found.extend([module, given])
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(*inputs)
    return found


def test_parameters_stay_where_they_are_in_a_graph_that_is_compiled_later() -> None:
    """Inductor copies other inputs into the memory of a CUDA graph, in each replay."""
    from torch._inductor.compile_fx import compile_fx

    module, inputs = seen(nn.Linear(3, 3), torch.ones(2, 3))
    static: list[list[int]] = []

    def inner(graph: Any, given: Any, **kwargs: Any) -> Any:
        static.append(list(kwargs["static_input_idxs"]))
        return make_boxed_func(graph.forward)

    other = apart(module)
    for one in (module, other):
        compile_fx(one, inputs, inner_compile=inner)
    assert static == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ([(x := torch.ones(8)), x.view(2, 4)], "share memory"),
        ([torch.ones(8)[1:]], "odd place"),
        (["a string"], "an input is str"),
    ],
)
def test_inputs_that_cannot_be_described_are_not_sent(inputs: list[Any], why: str) -> None:
    with pytest.raises(Unsent, match=why):
        layouts(inputs)


def test_inputs_are_described_without_their_numbers() -> None:
    given = torch.ones(2, 3).t().requires_grad_()
    assert layouts([given, 5]) == (((3, 2), (1, 3), torch.float32, given.device, True), 5)


def test_a_graph_that_nobody_else_can_read_is_a_failure_and_no_error(helper: Helper) -> None:
    graph = torch.fx.symbolic_trace(nn.ReLU())
    graph.lock = threading.Lock()
    answer = helper.do(Errand(graph, (), {}, None))
    assert answer.failure.startswith("Unsent: ")
    assert not helper.running


SLEEPS = "import time; time.sleep(60)"
MORE_THAN_A_PIPE_HOLDS = 4 << 20


@pytest.mark.parametrize(
    ("program", "why", "size"),
    [
        ("raise SystemExit(3)", "Error", 0),
        (LISTENS + "connection.recv_bytes()", "EOFError", 0),
        (LISTENS + "connection.recv_bytes(); connection.send_bytes(b'?')", "UnpicklingError", 0),
        (LISTENS + SLEEPS, "TimeoutError: no answer within", 0),
        (LISTENS + SLEEPS, "TimeoutError: no answer within", MORE_THAN_A_PIPE_HOLDS),
    ],
)
def test_a_process_that_fails_costs_nothing_else(
    helper: Helper, monkeypatch: pytest.MonkeyPatch, program: str, why: str, size: int
) -> None:
    monkeypatch.setattr(helping, "PROGRAM", program)
    monkeypatch.setattr(helping, "PATIENCE_S", 0.5 if SLEEPS in program else 60.0)
    assert why in helper.do(errand(size)).failure
    assert not helper.running


def test_a_program_that_ends_by_sigpipe_does_not_by_the_helpers(
    helper: Helper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helping, "PROGRAM", "raise SystemExit(3)")
    child = os.fork()
    if not child:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        failed = helper.do(errand(MORE_THAN_A_PIPE_HOLDS)).failure
        os._exit(0 if failed else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_process_that_cannot_be_started_is_a_failure_and_no_error(
    helper: Helper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    helper.begin()
    assert "FileNotFoundError" in helper.do(errand()).failure
    assert not helper.running


NEEDED = """
import os, pathlib
pathlib.Path(os.environ["NEEDED"]).write_text(str(os.getpid()))
"""


def test_a_process_that_was_started_has_what_it_needs_and_waits_for_its_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "needed.py").write_text(NEEDED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NEEDED", str(found := tmp_path / "found"))
    # It has to wait for longer than processes that have nothing more to do.
    program = (
        f"import {worker_main.__name__} as h; h.IDLE_S = 1.0; h._place = h._answered = print; "
    )
    program += "h.main()"
    monkeypatch.setattr(helping, "PROGRAM", program)
    helper, gpus = Helper("needed"), list[int]()
    monkeypatch.setattr(helping, "_room", lambda gpu, processes: gpus.append(gpu))
    helper.start()
    end = time.monotonic() + 60
    while not (found.exists() and found.read_text()) and time.monotonic() < end:
        time.sleep(0.01)
    process = helper._process
    assert process is not None and found.read_text() == str(process.pid)
    time.sleep(1.5)
    helper.start()
    assert helper.running and not helper.begun
    assert gpus == [], "nothing was taken, and nothing has ended"
    helper.begin()
    assert helper.begun and helper._process is process and gpus == [-1]
    assert process.wait(60) == 0, "nobody asked it anything"


def test_a_process_that_nobody_lets_begin_ends(
    helper: Helper, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = f"import {worker_main.__name__} as h; h.PATIENCE_S = 0.1; h.main()"
    monkeypatch.setattr(helping, "PROGRAM", program)
    helper.start()
    assert helper._process is not None
    assert helper._process.wait(60) == 0


def test_nobody_waits_for_the_start_of_a_process_that_has_an_errand(helper: Helper) -> None:
    with helper._turn:
        helper.start()
    assert not helper.running


def test_a_process_that_is_ended_answers_nobody(
    helper: Helper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helping, "PROGRAM", LISTENS + SLEEPS)
    helper.begin()
    assert helper.running
    ending = threading.Timer(0.2, helper.close)
    ending.start()
    began = time.monotonic()
    assert "Error" in helper.do(errand()).failure
    assert time.monotonic() - began < 30
    helper.begin()
    assert not helper.running, "the program ends"


def test_a_forked_process_leaves_the_helper_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helping, "PROGRAM", LISTENS + SLEEPS)
    helping.HELPER.begin()
    connection = helping.HELPER._connection
    assert connection is not None
    child = os.fork()
    if not child:
        left = connection.closed and not helping.HELPER.running
        helping.HELPER.close()
        os._exit(0 if left else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert helping.HELPER.running
    helping.HELPER.end()


def test_a_process_without_errands_ends(helper: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"import {worker_main.__name__} as h; h.IDLE_S = 0.1; h.main()"
    monkeypatch.setattr(helping, "PROGRAM", program)
    helper.begin()
    assert helper._process is not None
    assert helper._process.wait(60) == 0


KILLED = """
import os, signal, sys, time
from nostall.attach.torch_compile.workers import worker as helper
helper.PROGRAM = (
    "import os, sys, time, nostall.attach.torch_compile.workers.worker_main as helper;"
    "helper.follow(os.getppid());"
    "helper.Connection(int(sys.argv[1])).send_bytes(b'ready'); time.sleep(60)"
)
helper.HELPER.begin()
print(helper.HELPER._process.pid, flush=True)
helper.HELPER._connection.recv_bytes()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_program_takes_the_process_along() -> None:
    command = [sys.executable, "-W", "ignore", "-c", KILLED]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-500:]
    place, end = Path("/proc") / done.stdout.strip(), time.monotonic() + 20
    while place.exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not place.exists()


def test_a_full_gpu_is_left_to_the_program(helper: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    around = Surroundings.here()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    helper.begin()
    assert not helper.running
    asked = helper.do(replace(errand(), surroundings=around)).failure
    assert asked == "Unsent: 1024 MB of the GPU are free; at least 2048"
    # One of two has taken nothing yet when the other one looks.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 80 << 30))
    second = Helper("torch", most=2)
    asked = second.do(replace(errand(), surroundings=around)).failure
    assert asked == "Unsent: 3072 MB of the GPU are free; at least 4096"


def test_two_graphs_are_not_written_down_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.13 registers a type for all threads while it does that."""
    from torch.fx._graph_pickler import GraphPickler

    inside, most = 0, 0
    original = GraphPickler.dumps

    def dumps(*args: Any) -> bytes:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.05)
        found: bytes = original(*args)
        inside -= 1
        return found

    monkeypatch.setattr(GraphPickler, "dumps", dumps)
    around = Surroundings.here()
    every = [replace(errand(), surroundings=around) for _ in range(4)]
    threads = [threading.Thread(target=one.written) for one in every]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (inside, most) == (0, 1)


def test_what_no_other_process_can_compile_is_told() -> None:
    assert not InductorHost({}).unsent
    assert not InductorHost(inductor_patches("reduce-overhead", None)).unsent
    tuned = InductorHost(inductor_patches("max-autotune-no-cudagraphs", None)).unsent
    assert tuned == "Inductor measures while it compiles (max_autotune)"
    assert EagerHost().unsent
    with config.patch(fx_graph_cache=False):
        assert InductorHost({}).unsent == "Inductor's cache is off"
    with config.patch({"triton.autotune_at_compile_time": True}):
        assert "autotune_at_compile_time" in InductorHost({}).unsent
    with config.patch(post_grad_custom_post_pass=lambda graph: None):
        assert "a pass of the program's own" in InductorHost({}).unsent
    assert "a pass of" in InductorHost({"joint_custom_post_pass": print}).unsent


def test_a_process_is_set_up_as_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "here")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), config.patch(max_fusion_size=7):
        there = Surroundings.here()
    monkeypatch.delenv("TRITON_CACHE_DIR")
    before = config.max_fusion_size
    try:
        with there.set(traced=True):
            assert not torch.is_grad_enabled()
            assert torch.is_autocast_enabled("cpu")
            assert config.max_fusion_size == 7
            assert os.environ["TRITON_CACHE_DIR"] == "here"
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    finally:
        config.max_fusion_size = before


def test_where_functions_do_something_else_nothing_is_sent() -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    with Mode(), pytest.raises(Unsent, match="a mode is on"):
        Surroundings.here()
    with torch.device("cpu"):
        Surroundings.here()


def test_names_of_the_cache_are_those_of_a_program_whose_own_module_was_first() -> None:
    """They tell which module imported PyTorch first."""
    import sys

    before = dict(sys.modules)
    try:
        torch_state._own("the_programs_own")
        assert torch_state._owner() == "the_programs_own"
        torch_state._own("torch._utils")
        assert torch_state._owner() == "torch._utils"
    finally:
        sys.modules.clear()
        sys.modules.update(before)


def test_a_graph_that_has_chosen_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(HELPER, "begin", lambda: asked.append("begin"))
    monkeypatch.setattr(HELPER, "do", lambda errand: asked.append("do") or Answer("no luck"))
    for reason, expected in (("chosen", []), ("", ["begin", "do"])):
        preparation, report = Preparation(), GraphReport(reason=reason)
        ahead = Ahead(preparation, report)
        ahead.begin(1)
        graph = torch.fx.symbolic_trace(nn.ReLU())
        assert ahead.stitched(graph, [torch.ones(3)], {}, Selection())
        end = time.monotonic() + 30
        while not preparation.ready and time.monotonic() < end:
            time.sleep(0.01)
        assert preparation.ready
        assert asked == expected
        assert report.not_ahead == ("" if reason else "no luck")


def test_threads_of_the_background_are_on_the_programs_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new thread is on the first one."""
    places = threading.local()

    @contextlib.contextmanager
    def on(device: int) -> Iterator[None]:
        places.device = device
        yield
        places.device = None

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", on)
    seen: dict[str, int | None] = {}

    def see(name: str) -> None:
        seen[name] = getattr(places, "device", None)

    def work() -> Iterator[Callable[[], None]]:
        see("found")
        yield lambda: see("done")

    preparation = Preparation()
    preparation.add(work)
    preparation.add_last(lambda: see("last"))
    preparation.start()
    end = time.monotonic() + 30
    while not preparation.ready and time.monotonic() < end:
        time.sleep(0.01)
    assert seen == {"found": 3, "done": 3, "last": 3}
