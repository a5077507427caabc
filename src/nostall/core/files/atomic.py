"""Output files: regular files are replaced atomically, streams such as FIFOs are written to.

Readers and killed writers never see or leave a partial regular file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import select
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nostall.core.errors import BadInput, BadRun

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


_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{8}\.partial")
"""Name of a temporary file: ``.NAME.XXXXXXXX.partial``."""
_NAME_BYTES = 200
"""Bytes of the file's name in that of its temporary file; file systems allow 255 in all."""


def write_atomically(target: Path, data: bytes) -> None:
    """Write ``data`` to ``target``, as :func:`replaced_file` does.

    Raises :class:`BadRun` if it cannot be written.
    """
    try:
        with replaced_file(target) as file:
            file.write(data)
    except OSError as error:
        raise BadRun(f"cannot write {target}: {error.strerror}; {write_remedy(error)}") from error


def write_text_atomically(target: Path, text: str, *, parents: bool = False) -> None:
    """As :func:`write_atomically`, for text as UTF-8.

    Bytes of file names that are not UTF-8 become escapes such as ``\\udcff``.  ``parents``: create
    the folder of ``target`` first.
    """
    if parents:
        create_folder(target.parent)
    write_atomically(target, text.encode(errors="backslashreplace"))


def create_folder(folder: Path) -> None:
    """Create a folder and its parents; does nothing if it exists.

    Raises :class:`BadRun` if that is not possible.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise BadRun(f"cannot write to {folder}: it is not a folder; give another one") from error
    except OSError as error:
        raise BadRun(
            f"cannot create the folder {folder}: {error.strerror}; {write_remedy(error)}"
        ) from error


@contextmanager
def replaced_file(target: Path, folder: Path | None = None) -> Iterator[IO[bytes]]:
    """A new file whose content goes to ``target`` when the context ends without an exception.

    A regular file is replaced: readers see the old content or the new one, never a part.  Its mode
    and, if permitted, its owner are kept; the mode of a new file follows the umask.  A symbolic
    link stays, and its target is replaced or created.  A stream (a FIFO, a character device, an
    open file such as /dev/stdout) gets the content after the context.

    The new file is written in ``folder`` (by default that of the replaced file), which must be on
    the same file system, and deleted after an exception, :class:`KeyboardInterrupt` included.
    Raises :class:`OSError` if it cannot be written, and for what :func:`find_destination` refuses.
    """
    destination = find_destination(target)
    if destination.is_stream:
        with tempfile.NamedTemporaryFile(prefix="nostall-") as spool:
            yield spool
            spool.flush()
            destination.send(Path(spool.name).read_bytes())
        return
    path = destination.path
    if folder is None or target.is_symlink():
        folder = path.parent
    temporary, file = _open_temporary(folder, path.name)
    try:
        with file:
            _keep_attributes(path, file.fileno())
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)  # still locked, so that no other process removes it
    except BaseException:  # raised again; Ctrl-C, too, must leave no partial file
        with suppress(OSError):
            temporary.unlink()
        raise


def _keep_attributes(old: Path, new: int) -> None:
    """Give the descriptor ``new`` the owner and the mode of the file that it replaces, if any."""
    try:
        status, own = old.stat(), os.fstat(new)
    except FileNotFoundError:
        return
    with suppress(OSError):  # another user's file, or a file system without owners
        if (status.st_uid, status.st_gid) != (own.st_uid, own.st_gid):
            os.fchown(new, status.st_uid, status.st_gid)
    with suppress(OSError):
        os.fchmod(new, status.st_mode & 0o777)


def _open_temporary(folder: Path, name: str) -> tuple[Path, IO[bytes]]:
    """Create a temporary file that this process locks.

    Another process may remove it before it is locked (:func:`remove_abandoned`); a new one is then
    created.
    """
    short = os.fsdecode(os.fsencode(name)[:_NAME_BYTES])
    while True:
        path = folder / f".{short}.{secrets.token_hex(4)}.partial"
        file = path.open("xb")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return path, file
        file.close()


def remove_abandoned(folder: Path) -> None:
    """Delete temporary files in ``folder`` whose writers have ended."""
    with suppress(OSError):
        for path in folder.iterdir():
            if _TEMPORARY.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                with suppress(OSError), path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while it is written
                    path.unlink()


def write_remedy(error: OSError) -> str:
    """What the user can do after a failed write."""
    if error.errno in _DISK_FULL:
        return "free space on this disk, or choose a place on another one"
    if error.errno == errno.EPIPE:
        return "start its reader again, or give a file"
    if error.errno in (errno.EISDIR, errno.ENXIO):
        return "give the path of a file"
    return "choose a writable place"


_MAX_POINTER = 1024
"""Bytes; Git LFS reads no longer file as a pointer."""
_LFS = re.compile(rb"version https?://\S+/spec/v\d+\n(?:.*\n)*?oid sha256:[0-9a-f]{64}\nsize (\d+)")
_ANNEX = re.compile(rb"/annex/objects/\S+\s*$")


def check_content(path: Path, error: type[BadInput]) -> None:
    """Raise ``error`` if a file is a pointer to its content, which is not here.

    Does nothing if the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_POINTER)
    except OSError:
        return
    if pointer := _LFS.match(text):
        raise error(
            f"{path} is a pointer of Git LFS to {int(pointer[1]):,} bytes that are not here; run "
            "'git lfs pull' in its repository, then give the file again"
        )
    if _ANNEX.match(text):
        raise error(
            f"{path} is a pointer of git-annex, and its content is not here; run 'git annex get' "
            "on it, then give the file again"
        )
