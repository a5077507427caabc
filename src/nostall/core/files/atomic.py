"""Output files: regular files are replaced atomically, streams such as FIFOs are written to.

Readers and killed writers never see or leave a partial regular file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from nostall.core.errors import BadRun
from nostall.core.files.destination import find_destination

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
