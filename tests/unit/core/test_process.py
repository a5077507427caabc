"""Child processes: messages, hangs, crashes, kills, invalid data, and the parent's end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nostall.core.process import Channel, ChildProcess, ProcessEnded

HERE = "tests.unit.core.test_process"
START_SECONDS = 60.0


def echo(channel: Channel) -> None:
    """Send every message back, until the parent closes the channel."""
    channel.send("ready")
    try:
        while True:
            channel.send(channel.receive())
    except ProcessEnded:
        pass


def hang(channel: Channel) -> None:
    channel.send("ready")
    time.sleep(60)


def exit_with_code(channel: Channel, code: int) -> None:
    os._exit(code)


def kill_itself(channel: Channel) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def write_bytes(channel: Channel, data: bytes) -> None:
    """Write raw bytes, which are not a complete message, and hang."""
    os.write(channel.fileno(), data)
    time.sleep(60)


def send_unreadable(channel: Channel) -> None:
    channel.send(Unreadable())


class Unreadable:
    """An object that can be pickled, but not unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return int, ("not a number",)


@pytest.fixture
def start() -> Iterator[Callable[..., ChildProcess]]:
    """Start child processes that are reaped after the test."""
    children: list[ChildProcess] = []

    def spawn(target: Callable[..., object], *arguments: Any, **options: Any) -> ChildProcess:
        children.append(ChildProcess.spawn(target, *arguments, **options))
        return children[-1]

    yield spawn
    for child in children:
        child.reap()


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_end(pid: int, seconds: float = 20.0) -> bool:
    """Wait until a process has ended; returns whether it has."""
    until = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not is_running(pid)


def test_messages_of_any_size_are_answered(start: Callable[..., ChildProcess]) -> None:
    child = start(echo)
    assert child.receive(START_SECONDS) == "ready"
    for message in (None, {"key": (1, 2.5)}, b"", b"x" * (5 << 20)):
        child.send(message, 10)
        assert child.receive(10) == message
    assert child.is_alive and is_running(child.pid)
    assert child.reap(10) == 0
    assert not child.is_alive and not is_running(child.pid)


def test_an_object_that_cannot_be_pickled_sends_nothing(start: Callable[..., ChildProcess]) -> None:
    child = start(echo)
    assert child.receive(START_SECONDS) == "ready"
    with pytest.raises((AttributeError, TypeError)):
        child.send(lambda: None)
    child.send("next", 10)
    assert child.receive(10) == "next"


def test_poll_reports_messages_and_the_end(start: Callable[..., ChildProcess]) -> None:
    child = start(echo)
    assert child.poll(START_SECONDS) and child.receive(0) == "ready"
    assert not child.poll() and not child.poll(0.05)
    waits = []
    for _ in range(3):  # the shortest one: other programs can delay any of them
        before = time.monotonic()
        assert not child.poll() and not child._channel.poll()
        waits.append(time.monotonic() - before)
    assert min(waits) < 0.5
    child.send("message")
    assert child.poll(10) and child.receive(0) == "message"
    child.kill()
    assert child.poll(10)
    child.reap()
    assert child.poll()


def test_a_hanging_child_misses_its_deadline_and_is_killed(
    start: Callable[..., ChildProcess],
) -> None:
    child = start(hang)
    assert child.receive(START_SECONDS) == "ready"
    before = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.2 s"):
        child.receive(0.2)
    assert time.monotonic() - before < 5
    assert child.reap(0.1) == -signal.SIGKILL
    assert time.monotonic() - before < 5


def test_a_child_that_does_not_read_misses_the_deadline_of_a_send(
    start: Callable[..., ChildProcess],
) -> None:
    child = start(hang)
    assert child.receive(START_SECONDS) == "ready"
    with pytest.raises(TimeoutError, match="took no message"):
        child.send(b"x" * (50 << 20), 0.5)


@pytest.mark.parametrize(
    ("target", "arguments", "code"),
    [(exit_with_code, (0,), 0), (exit_with_code, (7,), 7), (kill_itself, (), -signal.SIGKILL)],
)
def test_the_end_of_a_child_is_reported_with_its_exit_code(
    target: Callable[..., object],
    arguments: tuple[Any, ...],
    code: int,
    start: Callable[..., ChildProcess],
) -> None:
    child = start(target, *arguments)
    with pytest.raises(ProcessEnded):
        child.receive(START_SECONDS)
    with pytest.raises(ProcessEnded):
        child.send(b"x" * (1 << 20), 10)
    assert child.reap(10) == code


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"garbage without end", ProcessEnded),
        (b"\0\0\0", TimeoutError),
        (b"\0\0\0\0\0\0\0\x10partial", TimeoutError),
        (b"\0\0\0\0\0\0\0\4junk", ProcessEnded),
    ],
)
def test_invalid_or_incomplete_data_is_an_error_within_the_deadline(
    data: bytes, error: type[Exception], start: Callable[..., ChildProcess]
) -> None:
    child = start(write_bytes, data)
    assert child.poll(START_SECONDS)
    before = time.monotonic()
    with pytest.raises(error):
        child.receive(0.5)
    assert time.monotonic() - before < 5


def test_a_message_that_cannot_be_unpickled_is_an_error(start: Callable[..., ChildProcess]) -> None:
    child = start(send_unreadable)
    with pytest.raises(ProcessEnded, match="cannot be read"):
        child.receive(START_SECONDS)


def test_kill_from_another_thread_ends_a_receive(start: Callable[..., ChildProcess]) -> None:
    child = start(hang)
    assert child.receive(START_SECONDS) == "ready"
    threading.Timer(0.2, child.kill).start()
    with pytest.raises(ProcessEnded):
        child.receive(30)
    assert child.reap() == -signal.SIGKILL
    assert child.reap() == -signal.SIGKILL


# Python 3.12 warns of forks in processes with threads, as the test runner's.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_copy_of_the_parent_leaves_the_child_alone(
    start: Callable[..., ChildProcess],
) -> None:
    child = start(echo)
    assert child.receive(START_SECONDS) == "ready"
    copy = os.fork()
    if copy == 0:
        try:
            child.kill()
            os._exit(0 if child.reap() is None and not child.is_alive else 1)
        finally:
            os._exit(2)
    assert os.waitpid(copy, 0)[1] == 0
    child.send("message", 10)
    assert child.receive(10) == "message"


def run_parent(body: str) -> subprocess.Popen[str]:
    """Start a program that runs ``body`` and prints the process ids of its children."""
    lines = ["import os, signal, sys, time", f"from {HERE} import *", body]
    program = "\n".join(lines)
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )


def started_children(parent: subprocess.Popen[str]) -> list[int]:
    assert parent.stdout is not None
    return [int(pid) for pid in parent.stdout.readline().split()]


SPAWN_AND_PRINT = """
child = ChildProcess.spawn({target}, daemon={daemon})
child.receive(60)
print(child.pid, flush=True)
"""


def test_a_child_ends_after_its_parent_was_killed() -> None:
    body = SPAWN_AND_PRINT.format(target="echo", daemon=False) + "time.sleep(60)"
    with run_parent(body) as parent:
        (child,) = started_children(parent)
        assert is_running(child)
        parent.kill()
        assert wait_for_end(child)


@pytest.mark.parametrize("daemon", [False, True])
def test_a_running_child_is_killed_when_its_parent_exits(daemon: bool) -> None:
    with run_parent(SPAWN_AND_PRINT.format(target="hang", daemon=daemon)) as parent:
        (child,) = started_children(parent)
        assert parent.wait(20) == 0
        assert wait_for_end(child)


def test_sending_to_a_dead_child_does_not_raise_sigpipe() -> None:
    body = "signal.signal(signal.SIGPIPE, signal.SIG_DFL)"
    body += SPAWN_AND_PRINT.format(target="hang", daemon=True)
    body += "child.kill()\ntry:\n    child.send(b'x')\nexcept ProcessEnded:\n    sys.exit(5)"
    with run_parent(body) as parent:
        started_children(parent)
        assert parent.wait(20) == 5


COMMAND = """
import sys
from nostall.core.process import Channel, ProcessEnded
channel = Channel.from_descriptor(int(sys.argv[-1]))
channel.send(sys.argv[1])
try:
    channel.send(channel.receive() + 1)
    channel.receive()
except ProcessEnded:
    sys.exit(3)
"""


def test_a_command_gets_the_descriptor_of_its_channel() -> None:
    child = ChildProcess.run([sys.executable, "-c", COMMAND, "argument"])
    assert child.receive(START_SECONDS) == "argument"
    child.send(41)
    assert child.receive(10) == 42
    assert child.is_alive and is_running(child.pid)
    assert child.reap(10) == 3
    assert not child.is_alive


def test_a_command_that_hangs_is_killed() -> None:
    child = ChildProcess.run([sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(TimeoutError):
        child.receive(0.1)
    assert child.reap() == -signal.SIGKILL


def test_a_command_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        ChildProcess.run(["/no/such/program"])
