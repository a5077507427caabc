"""Processor time of the processes that compile, counted once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from nostall.attach.torch_compile.workers import cpu_time, tasks
from nostall.attach.torch_compile.workers import worker as helping
from nostall.attach.torch_compile.workers.cpu_time import Shared, compiling, counted, ended, tree
from nostall.attach.torch_compile.workers.tasks import Preparation
from nostall.attach.torch_compile.workers.worker import Helper

BURN = """
import time
while time.process_time() < 0.3: pass
"""
LEAST, MOST = 0.25, 2.0


def burn() -> None:
    subprocess.run([sys.executable, "-S", "-c", BURN], check=True)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests of this process waited for is known."""
    children = Shared(ended)
    with children.open(lambda seconds: None):
        pass
    monkeypatch.setattr(cpu_time, "ENDED", children)
    monkeypatch.setattr(tasks, "ENDED", children)


@pytest.mark.usefixtures("apart")
def test_a_process_that_was_waited_for_counts_once() -> None:
    one: list[float] = []
    other: list[float] = []
    with counted(one.append):
        with counted(other.append):
            burn()
        assert LEAST / 2 < sum(other) < MOST / 2
    assert sum(one) == pytest.approx(sum(other), abs=0.1), "they shared it"
    assert LEAST < sum(one) + sum(other) < MOST
    with counted(other.append):
        pass
    assert sum(other) < MOST / 2


def test_what_a_process_has_told_itself_does_not_count_when_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    children = Shared(ended)
    monkeypatch.setattr(cpu_time, "ENDED", children)
    monkeypatch.setattr(helping, "ENDED", children)
    monkeypatch.setattr(helping, "PROGRAM", f"{BURN}time.sleep(60)")
    helper, found = Helper("torch", on_gpu=False), list[float]()
    helper.begin()
    assert helper._process is not None
    end = time.monotonic() + 20
    while tree(helper._process.pid) < LEAST and time.monotonic() < end:
        time.sleep(0.01)
    with counted(found.append):
        helper.end()
    assert sum(found) < LEAST / 2
    # Nobody asked it, so nobody was told: whoever asks now is, once.
    assert helper.untold() > LEAST / 2
    assert helper.untold() == 0.0


@pytest.mark.usefixtures("apart")
def test_what_is_started_in_the_background_counts() -> None:
    preparation = Preparation()
    done = threading.Event()

    def work() -> list[tasks.Task]:
        done.set()
        return [burn]

    preparation.add(work)
    preparation.start()
    assert done.wait(20)
    for _ in range(400):
        if preparation.ready:
            break
        threading.Event().wait(0.05)
    assert preparation.ready
    assert LEAST < preparation.cpu_seconds < MOST


def test_a_process_that_keeps_compilers_counts_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    below = f"{BURN}print('burnt', flush=True); time.sleep(60)"
    command = [sys.executable, "-S", "-c", below]
    text = f"import subprocess, time; subprocess.Popen({command!r}); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, start_new_session=True
    ) as keeper:
        try:
            assert keeper.stdout is not None and keeper.stdout.readline() == b"burnt\n"
            assert LEAST < tree(keeper.pid) < MOST
            pools = SimpleNamespace(_pool_set=[SimpleNamespace(process=keeper), SimpleNamespace()])
            monkeypatch.setitem(sys.modules, "torch._inductor.async_compile", pools)
            assert LEAST < compiling() < MOST
        finally:
            os.killpg(keeper.pid, signal.SIGKILL)
    assert tree(keeper.pid) == 0.0


def test_where_nobody_tells_nothing_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.delitem(sys.modules, "torch._inductor.async_compile", raising=False)
    assert ended() == compiling() == 0.0


def test_what_is_gone_takes_nothing_away() -> None:
    told = iter([1.0, 3.0, 0.5, 1.5])
    shared, found = Shared(lambda: next(told)), list[float]()
    for _ in range(2):
        with shared.open(found.append):
            pass
    assert found == [2.0, 1.0]
