"""Supervised child processes: a message channel, deadlines for all waits, and reliable reaping."""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.util  # registers its exit handler before this module does; see below
import os
import pickle
import select
import socket
import struct
import subprocess
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import ceil
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Protocol

from nostall.core.errors import one_line

MAX_MESSAGE_BYTES = 4 << 30
"""A larger length in a header means that the header is invalid."""
_HEADER = struct.Struct("!Q")
_MAX_COPY_BYTES = 1 << 14
"""A larger message is sent without being copied behind its header."""
_NO_SIGPIPE = getattr(socket, "MSG_NOSIGNAL", 0)
_MIN_PAUSE, _MAX_PAUSE = 5e-4, 0.05
"""Seconds between two looks at a child that is ending."""
_MIN_TIMEOUT = 1e-6
"""Seconds; a timeout of 0 would make a socket non-blocking."""


class ProcessEnded(Exception):
    """The other end of a channel was closed, or sent a message that cannot be read."""


class Channel:
    """One end of a bidirectional pipe for Python objects, which are pickled.

    After :class:`ProcessEnded`, :class:`TimeoutError` or an interrupt the channel must not be used
    further, because a message may be incomplete.  Sending to a closed channel never raises SIGPIPE,
    which would end a process that has restored the signal's default action.
    """

    def __init__(self, endpoint: socket.socket) -> None:
        """``endpoint``: a connected stream socket."""
        self._socket = endpoint

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Both ends of a new channel."""
        first, second = socket.socketpair()
        return cls(first), cls(second)

    @classmethod
    def from_descriptor(cls, descriptor: int) -> Channel:
        """The end with this file descriptor, which :meth:`ChildProcess.run` passes to its child."""
        return cls(socket.socket(fileno=descriptor))

    def __del__(self) -> None:
        # A channel that is dropped without close() closes quietly, as multiprocessing's does.
        self._socket.close()

    def fileno(self) -> int:
        """The file descriptor, or -1 if the channel is closed."""
        return self._socket.fileno()

    def send(self, message: object, timeout: float | None = None) -> None:
        """Send a picklable object, within ``timeout`` seconds (None: without a deadline).

        Raises :class:`ProcessEnded` if the other end is closed, and :class:`TimeoutError`.
        """
        data = pickle.dumps(message)
        header = _HEADER.pack(len(data))
        deadline = None if timeout is None else monotonic() + timeout
        try:
            if len(data) > _MAX_COPY_BYTES:
                self._write(header, deadline)
                self._write(data, deadline)
            else:
                self._write(header + data, deadline)
        except TimeoutError:
            raise TimeoutError(f"the process took no message within {timeout:g} s") from None
        except OSError as error:
            raise ProcessEnded(f"the channel is closed ({error})") from error

    def receive(self, timeout: float | None = None) -> Any:
        """Receive the next object, within ``timeout`` seconds (None: without a deadline).

        The deadline holds for the whole message, even if the sender stops in the middle of it.

        Raises :class:`ProcessEnded` if the other end is closed or the message cannot be read, and
        :class:`TimeoutError`.
        """
        deadline = None if timeout is None else monotonic() + timeout
        try:
            (size,) = _HEADER.unpack(self._read(_HEADER.size, deadline))
            if size > MAX_MESSAGE_BYTES:
                raise ProcessEnded("the process sent data that is not a message")
            data = self._read(size, deadline)
        except TimeoutError:
            raise TimeoutError(f"no answer within {timeout:g} s") from None
        except OSError as error:
            raise ProcessEnded(f"the channel is closed ({error})") from error
        try:
            return pickle.loads(data)
        except Exception as error:  # unpickling can raise any exception
            raise ProcessEnded(f"a message cannot be read ({one_line(error)})") from error

    def poll(self, timeout: float = 0.0) -> bool:
        """Wait at most ``timeout`` seconds for a message or the other end's closing.

        Returns whether there is one; :meth:`receive` then does not have to wait for its start.
        """
        if self.fileno() < 0:
            return True
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(ceil(1e3 * timeout)))

    def close(self) -> None:
        """Close this end; the other end's next :meth:`receive` raises :class:`ProcessEnded`."""
        self._socket.close()

    def _write(self, data: bytes, deadline: float | None) -> None:
        self._set_timeout(deadline)
        self._socket.sendall(data, _NO_SIGPIPE)

    def _read(self, count: int, deadline: float | None) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            self._set_timeout(deadline)
            received = self._socket.recv_into(view)
            if not received:
                raise ProcessEnded("the channel is closed")
            view = view[received:]
        return data

    def _set_timeout(self, deadline: float | None) -> None:
        remaining_s = None if deadline is None else max(_MIN_TIMEOUT, deadline - monotonic())
        self._socket.settimeout(remaining_s)


class _Handle(Protocol):
    """The operating system's side of a child process."""

    @property
    def pid(self) -> int: ...

    def wait(self, seconds: float | None) -> int | None:
        """Wait for the end; returns the exit code, or None if it still runs."""
        ...

    def kill(self) -> None: ...

    def disown(self) -> None:
        """Suppress warnings about the child in a forked copy of the parent."""
        ...


class ChildProcess:
    """A child process and the parent's end of a channel to it.

    Children that still run when the parent exits normally are killed.  If the parent is killed, the
    child's next :meth:`Channel.receive` raises :class:`ProcessEnded`, unless a forked copy of the
    parent still has the channel open (:meth:`reap` closes it there).
    """

    def __init__(self, handle: _Handle, channel: Channel) -> None:
        self._handle, self._channel = handle, channel
        self._parent = os.getpid()
        _children.add(self)

    @classmethod
    def spawn(
        cls, target: Callable[..., object], *arguments: Any, daemon: bool = True
    ) -> ChildProcess:
        """Run ``target(channel, *arguments)`` in a new Python process (multiprocessing's spawn).

        A ``daemon`` process cannot have children of multiprocessing.
        """
        own_end, child_end = Channel.pair()
        try:
            process = multiprocessing.get_context("spawn").Process(
                target=target, args=(child_end, *arguments), daemon=daemon
            )
            process.start()
        except BaseException:  # KeyboardInterrupt, too: the parent's end must not stay open
            own_end.close()
            raise
        finally:
            child_end.close()
        return cls(_SpawnedProcess(process), own_end)

    @classmethod
    def run(
        cls,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        log: Path = Path(os.devnull),
    ) -> ChildProcess:
        """Run a command with the file descriptor of its channel as the last argument.

        Unlike :meth:`spawn` it does not import the parent's main module.  The child's standard
        input is empty, and its output goes into the file ``log``.
        """
        own_end, child_end = Channel.pair()
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [*command, str(child_end.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[child_end.fileno()],
                    env=env,
                )
        except BaseException:  # KeyboardInterrupt, too: the parent's end must not stay open
            own_end.close()
            raise
        finally:
            child_end.close()
        return cls(_Command(process), own_end)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._handle.pid

    @property
    def is_alive(self) -> bool:
        """Whether the child still runs; False in a forked copy of the parent."""
        return self._is_parent and self._handle.wait(0) is None

    def send(self, message: object, timeout: float | None = None) -> None:
        """As :meth:`Channel.send`."""
        self._channel.send(message, timeout)

    def receive(self, timeout: float | None = None) -> Any:
        """As :meth:`Channel.receive`."""
        return self._channel.receive(timeout)

    def poll(self, timeout: float = 0.0) -> bool:
        """As :meth:`Channel.poll`."""
        return self._channel.poll(timeout)

    def kill(self) -> None:
        """Kill the child and wait for its end; may be called from any thread.

        The channel stays open: a thread in :meth:`receive` gets :class:`ProcessEnded`.
        """
        if self._is_parent and self._handle.wait(0) is None:
            self._handle.kill()
            self._handle.wait(None)

    def reap(self, grace_seconds: float = 0.0) -> int | None:
        """Close the channel, wait for the child's end, and return its exit code.

        A child that still runs after ``grace_seconds`` is killed.  The exit code is negative if a
        signal ended the child.  In a forked copy of the parent only the channel is closed, and the
        result is None.
        """
        self._channel.close()
        if not self._is_parent:
            self._handle.disown()
            return None
        code = self._handle.wait(grace_seconds)
        if code is None:
            self._handle.kill()
            code = self._handle.wait(None)
        _children.discard(self)
        return code

    @property
    def _is_parent(self) -> bool:
        return os.getpid() == self._parent


class _SpawnedProcess:
    """Handle of a process of multiprocessing."""

    def __init__(self, process: multiprocessing.process.BaseProcess) -> None:
        self._process = process
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def wait(self, seconds: float | None) -> int | None:
        # Polls, because join is not thread-safe, and with a timeout it also waits for forked
        # grandchildren.
        until = None if seconds is None else monotonic() + seconds
        pause = _MIN_PAUSE
        while True:
            with self._lock:
                code = self._process.exitcode
            if code is not None or (until is not None and monotonic() >= until):
                return code
            sleep(pause if until is None else max(0.0, min(pause, until - monotonic())))
            pause = min(2 * pause, _MAX_PAUSE)

    def kill(self) -> None:
        with self._lock:
            self._process.kill()

    def disown(self) -> None: ...


class _Command:
    """Handle of a process of subprocess."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, seconds: float | None) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def kill(self) -> None:
        self._process.kill()

    def disown(self) -> None:
        self._process.returncode = 0  # otherwise its destructor warns that it still runs


_children: weakref.WeakSet[ChildProcess] = weakref.WeakSet()


@atexit.register
def _kill_children() -> None:
    """Kill all children at the parent's exit.

    Exit handlers run in reverse order, so this runs before that of multiprocessing, which would
    wait for children that are not daemons.
    """
    for child in list(_children):
        with suppress(OSError):
            child.kill()
