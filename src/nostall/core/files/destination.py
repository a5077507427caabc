"""What an output path stands for: a file that is replaced, or a stream that is written to."""

from __future__ import annotations

import errno
import os
import re
import select
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

MAX_LINKS = 40
"""Symbolic links that are followed, as Linux does."""
_OPEN_FILE = re.compile(r"(/proc/\d+)(?:/task/\d+)?/fd/(\d+)")
"""Resolved path of an open file of a process, such as /dev/stdout."""
_REFUSED = {
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a block device, such as a disk",
}
ALLOWED = "a file, a link to one, a FIFO, a character device or an open file such as /dev/stdout"


@dataclass(frozen=True, slots=True)
class Destination:
    """Where output goes after symbolic links were followed."""

    path: Path
    """The file that is replaced or created, or the stream's path."""
    is_stream: bool = False
    """Whether data are written to what is at ``path``: a FIFO, a character device or an open file.
    """
    descriptor: int | None = None
    """Descriptor of this process that ``path`` stands for, as in /dev/fd/3."""

    def send(self, data: bytes) -> None:
        """Write ``data`` to the stream.  Raises :class:`OSError` if it cannot be written."""
        if self.descriptor is not None:
            for printed in (sys.stdout, sys.stderr):  # None if the shell closed the descriptor
                if printed is not None:
                    printed.flush()  # what was printed comes first
            _write_all(self.descriptor, data)
            return
        # O_APPEND: another process may have redirected its stream to a regular file.
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            _write_all(handle, data)
        finally:
            os.close(handle)


def find_destination(target: Path) -> Destination:
    """Follow the links of ``target``; links to missing files name the file to create.

    An open file of a process (/dev/stdout, /dev/fd/N, /proc/self/fd/N) is a stream even if a shell
    redirected it to a regular file, because that file is the shell's.  Raises :class:`OSError` for
    a folder, a socket, a block device, a loop of links, and a path that cannot be followed.
    """
    path = target
    for _ in range(MAX_LINKS):
        path = Path(os.path.realpath(path.parent)) / path.name
        if opened := _OPEN_FILE.fullmatch(str(path)):
            is_own = opened[1] == os.path.realpath("/proc/self")
            return Destination(path, True, int(opened[2]) if is_own else None)
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            return Destination(path)
        if stat.S_ISLNK(mode):
            path = path.parent / path.readlink()
            continue
        if refused := _REFUSED.get(stat.S_IFMT(mode)):
            code = errno.EISDIR if stat.S_ISDIR(mode) else errno.ENXIO
            raise OSError(code, f"it is {refused}; allowed is {ALLOWED}", str(target))
        return Destination(path, not stat.S_ISREG(mode))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(target))


def is_stream(target: Path) -> bool:
    """Whether output to ``target`` is written to a stream, so that no file is replaced."""
    try:
        return find_destination(target).is_stream
    except OSError:
        return False


def _write_all(handle: int, data: bytes) -> None:
    """Write all bytes, also to a descriptor that does not block."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(handle, rest) :]
        except BlockingIOError:
            select.select([], [handle], [])
