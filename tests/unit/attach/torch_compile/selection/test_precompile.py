"""What a program asks of the process that writes its kernels, and what it does without one."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

triton = pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from nostall.attach.torch_compile.measure.plan_tuning import Racing  # noqa: E402
from nostall.attach.torch_compile.report import GraphReport  # noqa: E402
from nostall.attach.torch_compile.rewrite.compilers import InductorHost  # noqa: E402
from nostall.attach.torch_compile.selection import (  # noqa: E402
    candidate_builder,
    precompile,
)
from nostall.attach.torch_compile.selection.candidate_builder import Undecided  # noqa: E402
from nostall.attach.torch_compile.selection.precompile import Ahead  # noqa: E402
from nostall.attach.torch_compile.workers.codegen_job import Architecture, Written  # noqa: E402
from nostall.attach.torch_compile.workers.tasks import Preparation  # noqa: E402
from nostall.attach.torch_compile.workers.worker import Answer  # noqa: E402
from nostall.fusion.graph.graph import Graph  # noqa: E402
from tests.unit.attach.torch_compile.regions import HOPPER, bordered, normed, race  # noqa: E402


class Process:
    """Answers as it was told; ``asked`` are the errands."""

    running = True

    def __init__(self, *answers: Answer[Any]) -> None:
        self.answers, self.asked = list(answers), list[str]()

    def do(self, errand: Any) -> Answer[Any]:
        self.asked.append(type(errand).__name__)
        return self.answers.pop(0)


def asking(monkeypatch: pytest.MonkeyPatch, process: Process, reason: str = "") -> Ahead:
    monkeypatch.setattr(precompile, "WRITER", process)
    monkeypatch.setattr(precompile, "target_of", lambda device: HOPPER)
    return Ahead(Preparation(), GraphReport(reason=reason))


CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def test_a_program_asks_until_everything_is_compiled_and_says_what_failed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    racing = Racing(normed(8), {})
    process = Process(
        Answer(done=Written((racing,), ("BadFusion: no luck",)), cpu_seconds=2.0),
        Answer(done=Written(left=3), cpu_seconds=1.0),
        Answer(done=Written(failures=("OSError: no room",))),
    )
    one = asking(monkeypatch, process)
    with caplog.at_level(logging.WARNING, "nostall"):
        assert one.written((), race(), CUDA) == (racing,)
        one.wait()
    assert process.asked == ["Writing", "Compiling", "Compiling"]
    assert [what in caplog.text for what in ("no luck", "no room")] == [True, True]
    assert one._preparation.cpu_seconds == 3.0
    assert not one.died


def test_where_the_process_fails_the_program_does_its_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = asking(monkeypatch, Process(Answer("EOFError: gone")))
    with caplog.at_level(logging.WARNING, "nostall"):
        assert one.written((), race(), CUDA) is None
    assert "EOFError: gone" in caplog.text


def test_nothing_is_asked_for_a_graph_that_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process()
    one = asking(monkeypatch, process, reason="faster as a whole")
    assert one.written((), race(), CUDA) == ()
    one.wait()
    assert process.asked == []


def test_a_graph_that_chooses_meanwhile_needs_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The process is ended then, which is no failure."""
    one = asking(monkeypatch, process := Process())

    def do(errand: Any) -> Answer[Any]:
        one._report.reason = "faster as a whole"
        return Answer("EOFError: gone")

    monkeypatch.setattr(process, "do", do)
    with caplog.at_level(logging.WARNING, "nostall"):
        assert one.written((), race(), CUDA) == ()
    assert not caplog.text


def test_a_compilation_that_does_not_end_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(precompile, "PATIENCE_S", 0.0)
    every = [Answer(done=Written(left=left)) for left in (3, 2, 2)]
    one = asking(monkeypatch, process := Process(*every))

    def end() -> None:
        process.running = False

    monkeypatch.setattr(process, "end", end, raising=False)
    with caplog.at_level(logging.WARNING, "nostall"):
        one.wait()
    assert one.died and "2 kernels are not compiled" in caplog.text
    assert not process.running and not process.answers


@pytest.mark.parametrize("which", ["Writing", "Compiling"])
def test_where_a_worker_died_the_program_does_not_try(
    monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    written = Answer(done=Written(died=which == "Writing"))
    one = asking(monkeypatch, Process(written, Answer(done=Written(died=True))))
    one.written((), race(), CUDA)
    assert one.died == (which == "Writing")
    one.wait()
    assert one.died


class Rivals:
    """In place of a graph's duels: what Inductor has to compile for them, numbered."""

    modules = ("forward",)

    def __init__(self, many: int) -> None:
        self.many, self.asked = many, 0

    def errands(self, host: Any) -> Iterator[int]:
        self.asked += 1
        yield from range(self.many)


def helping(monkeypatch: pytest.MonkeyPatch) -> Ahead:
    """``plain``: Inductor's first compilation took that long."""
    one = asking(monkeypatch, Process())
    monkeypatch.setattr(precompile, "errands", lambda duels, host: duels.errands(host))
    one._report.seconds["plain"] = 60.0
    return one


def test_two_processes_share_what_kernels_are_compared_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, rivals = helping(monkeypatch), Rivals(9)
    taken: dict[str, list[int]] = {"first": [], "second": []}
    other = threading.Event()

    def process(name: str) -> Any:
        def do(errand: int) -> Answer[Any]:
            taken[name].append(errand)
            # The first one has to wait for its first answer until all else is done.
            if name == "first":
                other.wait(30)
            elif errand == 8:
                other.set()
            return Answer(cpu_seconds=1.0)

        return SimpleNamespace(do=do, begun=True)

    first, second = process("first"), process("second")
    monkeypatch.setattr(precompile, "HELPER", first)
    threads = [
        threading.Thread(target=one.duels, args=(rivals, InductorHost({}), who))
        for who in (first, second)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(taken["first"] + taken["second"]) == [*range(9)]
    assert len(taken["first"]) == 1 and rivals.asked == 1
    assert one._preparation.cpu_seconds == 9.0


def test_what_an_answer_took_is_noted_while_another_thread_looks_for_errands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that waits there holds up the end of the program."""
    one, looked = helping(monkeypatch), threading.Event()

    class Slow(Rivals):
        def errands(self, host: Any) -> Iterator[int]:
            looked.wait(30)
            yield 0

    monkeypatch.setattr(precompile, "HELPER", process := Process(Answer("no luck")))
    looks = threading.Thread(
        target=one.duels,
        args=(Slow(1), InductorHost({}), process),
    )
    looks.start()
    one._asked("compiled", Process(Answer()), "errand")  # type: ignore[arg-type]
    assert looks.is_alive() and one._report.seconds["compiled"] < 5
    looked.set()
    looks.join(60)


@pytest.mark.parametrize(("modules", "leads", "begun"), [(1, True, 2), (0, True, 0), (1, False, 0)])
def test_nothing_is_begun_for_comparisons_that_there_will_not_be(
    monkeypatch: pytest.MonkeyPatch, modules: int, leads: bool, begun: int
) -> None:
    one, told = graph_of((), normed(8), normed(9)), list[int]()
    one.unsent, one.duels = "", SimpleNamespace(modules=["forward"] * modules)
    one.ahead.begin = told.append
    here = SimpleNamespace(here=lambda: SimpleNamespace(leads=leads))
    monkeypatch.setattr(candidate_builder, "Ranks", here)
    assert [*Undecided._write(one)] == ["wait"]
    assert told == [begun]


def test_a_second_process_that_was_not_started_takes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, rivals = helping(monkeypatch), Rivals(3)
    asleep = SimpleNamespace(begun=False)
    one.duels(rivals, InductorHost({}), asleep)  # type: ignore[arg-type]
    assert rivals.asked == 0
    monkeypatch.setattr(precompile, "HELPER", process := Process(*[Answer("no luck")] * 3))
    one.duels(rivals, InductorHost({}), process)  # type: ignore[arg-type]
    assert len(process.asked) == 1, "the program compiles what is left"


def noting(monkeypatch: pytest.MonkeyPatch, processors: int) -> list[str]:
    """What processes are told, where there are so many processors for compilers."""
    said: list[str] = []

    def process(name: str) -> Any:
        told = {what: partial(said.append, f"{name} {what}s") for what in ("start", "begin")}
        return SimpleNamespace(**told)

    monkeypatch.setattr(precompile, "HELPERS", tuple(map(process, ("first", "second", "third"))))
    monkeypatch.setattr(precompile, "COMPILERS", processors)
    monkeypatch.setattr(precompile, "WRITER", process("writer"))
    monkeypatch.setattr(precompile, "target_of", lambda device: HOPPER if device == CUDA else None)
    return said


@pytest.mark.parametrize(
    ("regions", "processors", "begun"),
    [(0, 8, 1), (5, 8, 1), (6, 8, 2), (9, 8, 3), (99, 8, 3), (99, 5, 2), (99, 3, 1)],
)
def test_more_processes_begin_for_many_regions_where_they_have_processors(
    monkeypatch: pytest.MonkeyPatch, regions: int, processors: int, begun: int
) -> None:
    said = noting(monkeypatch, processors)
    Ahead(Preparation(), GraphReport()).begin(regions)
    assert said == ["first begins", "second begins", "third begins"][:begun]
    said.clear()
    Ahead(Preparation(), GraphReport(reason="faster as a whole")).begin(regions)
    assert said == []


@pytest.mark.parametrize(
    ("device", "regions", "processors", "started"),
    [
        (CUDA, 7, 6, ["first starts", "second starts", "writer starts"]),
        (CPU, 0, 6, ["first starts"]),
        (CUDA, 99, 5, []),
    ],
)
def test_processes_start_during_the_first_step_only_where_there_are_processors_left(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    regions: int,
    processors: int,
    started: list[str],
) -> None:
    said = noting(monkeypatch, processors)
    Ahead(Preparation(), GraphReport()).start(device, regions)
    assert said == started


@pytest.mark.parametrize(
    ("unsent", "regions", "started"),
    [("", 2, [2]), ("", 0, []), ("nothing is done in the background", 2, [])],
)
def test_processes_start_when_there_are_regions_and_other_processes_may_compile(
    monkeypatch: pytest.MonkeyPatch, unsent: str, regions: int, started: list[int]
) -> None:
    monkeypatch.setattr(candidate_builder, "regions_of", lambda module: [normed(8)] * regions)
    one, told = graph_of(()), list[int]()
    one.report, one.observed = GraphReport(not_ahead=unsent), list[Graph]()
    one.duels = SimpleNamespace(modules=["forward"], add=lambda module: None)
    one.versions = SimpleNamespace(
        device=CUDA, varies=False, settings=SimpleNamespace(background=True)
    )
    one.preparation, one._write = Preparation(), None
    one.ahead.start = lambda device, compared: told.append(compared)
    Undecided._observe(one, "a graph")  # type: ignore[arg-type]
    assert told == started

    def fails(*given: Any) -> None:
        raise OSError("no luck")

    one.ahead.start = fails
    Undecided._observe(one, "another")  # type: ignore[arg-type]
    assert one.preparation._waiting == [None, None], "Inductor's compilation goes on"


def graph_of(found: Any, *graphs: Graph) -> Any:
    """As much of a graph of the backend as its regions need; ``found`` is what another process
    tells."""
    told = SimpleNamespace(written=lambda *_: found, wait="wait")
    one = SimpleNamespace(ahead=told, race=race(), unwritten=deque(graphs), unsent="not needed")
    one.versions = SimpleNamespace(device=CUDA)
    one._compared = partial(Undecided._compared, one)
    return one


def test_regions_that_were_written_elsewhere_race_and_are_waited_for() -> None:
    racing = (Racing(normed(8), {}),)
    one = graph_of(racing, normed(8))
    assert [*Undecided._write(one)] == ["wait"]
    assert one.race.regions == [*racing] and not one.unwritten
    assert [*Undecided._write(one)] == [], "there is nothing more to write"


def test_regions_that_nobody_else_writes_are_written_here_each_kernel_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path))
    warmed: list[str] = []
    monkeypatch.setattr(candidate_builder, "warm", lambda kernel, device: warmed.append(kernel))
    one = graph_of(None, normed(1 << 20), bordered(), normed(1 << 20), normed(8))
    with caplog.at_level(logging.WARNING, "nostall"):
        for task in Undecided._write(one):
            task()
    assert "opaque" in caplog.text
    expected = {kernel for rows in (1 << 20, 8) for kernel in race().prepare(normed(rows))}
    assert sorted(warmed) == sorted(expected)


ENDS = """
import sys, threading, time
from nostall.attach.torch_compile.selection import dispatcher as switch
from nostall.attach.torch_compile.workers import worker as helper
from nostall.attach.torch_compile.workers import tasks as background
from nostall.attach.torch_compile.selection.precompile import Ahead
from nostall.attach.torch_compile.workers.tasks import Preparation
from nostall.attach.torch_compile.report import GraphReport
helper.PROGRAM = "import time; time.sleep(60)"
preparation = Preparation()
ahead = Ahead(preparation, GraphReport())
helper.WRITER.begin()
preparation.add(lambda: [ahead.wait])
preparation.start()
while not background._busy.locked():
    time.sleep(0.01)
print(time.monotonic(), flush=True)
"""


def test_a_program_that_ends_does_not_wait_for_what_other_processes_compile() -> None:
    command = [sys.executable, "-W", "ignore", "-c", ENDS]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    assert time.monotonic() - float(ran.stdout) < 8


FORKS = """
import os, sys, threading, time
from nostall.attach.torch_compile.workers import tasks as background
from nostall.attach.torch_compile.workers import cpu_time as processor
preparation = background.Preparation()
begun, go = threading.Event(), threading.Event()
preparation.add(lambda: [lambda: begun.set() or (go.wait(60) and None)])
preparation.start()
begun.wait()
preparation._lock.acquire()
if os.fork() == 0:
    preparation.start()
    other = background.Preparation()
    other.add(lambda: [lambda: None])
    other.start()
    while not other.ready:
        time.sleep(0.01)
    sys.exit()
began = time.monotonic()
preparation._lock.release()
_, status = os.wait()
print(status, time.monotonic() - began, flush=True)
go.set()
"""


def test_a_forked_child_of_a_program_waits_for_none_of_its_threads() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKS]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    status, seconds = ran.stdout.split()
    assert status == "0" and float(seconds) < 5


def test_where_binaries_are_not_kept_or_not_needed_no_other_process_compiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton.runtime.driver, "_active", Architecture(HOPPER))
    assert precompile.target_of(torch.device("cuda")) == HOPPER
    assert precompile.target_of(torch.device("cpu")) is None
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", True)
    assert precompile.target_of(torch.device("cuda")) is None
    monkeypatch.setattr(triton.knobs.compilation, "always_compile", False)
    monkeypatch.setattr(triton.runtime.driver, "_active", object())
    assert precompile.target_of(torch.device("cuda")) is None, "there is no driver"
