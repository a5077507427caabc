"""Writes to what is not a regular file: links, FIFOs, devices, open files, and what is refused."""

from __future__ import annotations

import errno
import os
import pty
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nostall.core.errors import BadRun
from nostall.core.files.atomic import (
    create_folder,
    find_destination,
    is_stream,
    write_atomically,
    write_text_atomically,
)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def device(path: Path, minor: int) -> Path:
    """A copy of /dev/null (minor 3) or /dev/full (minor 7)."""
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
        path.write_bytes(b"")
    except OSError as error:
        pytest.skip(f"device nodes cannot be made here: {error}")
    return path


def read_in_background(path: Path, limit: int = -1) -> tuple[threading.Thread, list[bytes]]:
    """Read a FIFO until its writer closes it, or ``limit`` bytes."""
    parts: list[bytes] = []

    def read() -> None:
        with path.open("rb") as file:
            parts.append(file.read(limit))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread, parts


def test_a_new_file_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write_atomically(tmp_path / "new", b"x")
    finally:
        os.umask(old)
    assert mode(tmp_path / "new") == 0o640


@pytest.mark.parametrize("permissions", [0o600, 0o644, 0o755, 0o444])
def test_a_replaced_file_keeps_its_mode(tmp_path: Path, permissions: int) -> None:
    path = tmp_path / "old"
    path.write_bytes(b"old")
    path.chmod(permissions)
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new" and mode(path) == permissions


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_replaced_file_keeps_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "old"
    path.write_bytes(b"old")
    os.chown(path, 65534, 65533)
    path.chmod(0o640)
    write_atomically(path, b"new")
    status = path.stat()
    assert (status.st_uid, status.st_gid, mode(path)) == (65534, 65533, 0o640)


@pytest.mark.parametrize("exists", [True, False], ids=["target", "dangling"])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_link_stays_and_its_target_is_written(tmp_path: Path, exists: bool, depth: int) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    target = folder / "target"
    if exists:
        target.write_bytes(b"old")
        target.chmod(0o600)
    path = tmp_path / "link0"
    path.symlink_to("elsewhere/target")  # relative to the link
    for number in range(1, depth):
        path = tmp_path / f"link{number}"
        path.symlink_to(tmp_path / f"link{number - 1}")
    write_atomically(path, b"new")
    assert path.is_symlink() and not target.is_symlink()
    assert target.read_bytes() == b"new"
    assert mode(target) == 0o600 or not exists
    assert names(folder) == ["target"]


def test_a_link_in_a_linked_folder_is_relative_to_that_folder(tmp_path: Path) -> None:
    real = tmp_path / "a" / "b"
    real.mkdir(parents=True)
    (real / "link").symlink_to("../target")
    (tmp_path / "folder").symlink_to(real)
    write_atomically(tmp_path / "folder" / "link", b"new")
    assert (tmp_path / "a" / "target").read_bytes() == b"new"


def test_an_interrupted_write_through_a_link_leaves_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to("target")

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(BadRun, match="No space left"):
        write_atomically(tmp_path / "link", b"new")
    assert (tmp_path / "target").read_bytes() == b"old"
    assert names(tmp_path) == ["link", "target"]


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(BadRun, match="symbolic links"):
        write_atomically(tmp_path / "a", b"x")
    assert names(tmp_path) == ["a", "b"]


def test_a_fifo_is_written_and_stays(tmp_path: Path) -> None:
    fifo, data = tmp_path / "fifo", b"x" * 1_000_000  # more than a pipe holds
    os.mkfifo(fifo)
    (tmp_path / "link").symlink_to(fifo)
    for path in (fifo, tmp_path / "link"):
        thread, parts = read_in_background(fifo)
        write_atomically(path, data)
        thread.join(10)
        assert parts == [data]
    assert stat.S_ISFIFO(fifo.lstat().st_mode) and (tmp_path / "link").is_symlink()
    assert names(tmp_path) == ["fifo", "link"]


def test_a_reader_that_ends_is_an_error(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    thread, _ = read_in_background(fifo, 1)
    with pytest.raises(BadRun, match=r"cannot write .*fifo: Broken pipe; start its reader again"):
        write_atomically(fifo, b"x" * 10_000_000)
    thread.join(10)


def test_a_device_is_written_and_stays(tmp_path: Path) -> None:
    null, full = device(tmp_path / "null", 3), device(tmp_path / "full", 7)
    (tmp_path / "link").symlink_to("null")
    write_atomically(null, b"x")
    write_atomically(tmp_path / "link", b"x")
    with pytest.raises(BadRun, match="No space left on device; free space"):
        write_atomically(full, b"x")
    for path, minor in ((null, 3), (full, 7)):
        assert path.lstat().st_rdev == os.makedev(1, minor)
        assert stat.S_ISCHR(path.lstat().st_mode)
    assert names(tmp_path) == ["full", "link", "null"]


def test_a_terminal_is_written() -> None:
    ours, theirs = pty.openpty()
    try:
        write_atomically(Path(os.ttyname(theirs)), b"page\n")
        assert os.read(ours, 100) == b"page\r\n"
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("name", ["/dev/fd/{}", "/proc/self/fd/{}", "/proc/thread-self/fd/{}"])
def test_an_open_file_is_written_where_the_shell_is(tmp_path: Path, name: str) -> None:
    path = tmp_path / "shell"
    with path.open("wb", buffering=0) as file:
        file.write(b"before ")
        inode = path.stat().st_ino
        write_atomically(Path(name.format(file.fileno())), b"page ")
        file.write(b"after")
        assert path.stat().st_ino == inode
    assert path.read_bytes() == b"before page after"
    assert names(tmp_path) == ["shell"]


def test_a_descriptor_that_is_not_open_for_writing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with (tmp_path / "file").open("rb") as file, pytest.raises(BadRun, match="cannot write"):
        write_atomically(Path(f"/dev/fd/{file.fileno()}"), b"new")
    with pytest.raises(BadRun, match="cannot write"):
        write_atomically(Path("/dev/fd/987"), b"new")
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_pipe_that_does_not_block_gets_all_bytes() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    data, parts = b"x" * 1_000_000, []

    def read() -> None:
        with os.fdopen(reader, "rb") as file:
            parts.append(file.read())

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    write_atomically(Path(f"/dev/fd/{writer}"), data)
    os.close(writer)
    thread.join(10)
    assert parts == [data]


PRINT_AND_WRITE = """
import sys
from pathlib import Path
from nostall.core.files.atomic import write_atomically
print("before")
write_atomically(Path(sys.argv[1]), b"page\\n")
print("after")
"""


@pytest.mark.parametrize("target", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link"])
def test_standard_output_that_a_shell_redirected_is_written_in_order(
    tmp_path: Path, target: str
) -> None:
    path = tmp_path / "out"
    path.write_text("earlier\n")
    if target == "link":
        target = str(tmp_path / "link")
        Path(target).symlink_to("/dev/stdout")
    with path.open("a") as file:
        subprocess.run([sys.executable, "-c", PRINT_AND_WRITE, target], stdout=file, check=True)
    assert path.read_text() == "earlier\nbefore\npage\nafter\n"


def test_an_open_file_of_another_process_is_appended_to(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as file:
        file.write("earlier\n")
        file.flush()
        other = subprocess.Popen(["sleep", "60"], stdout=file)
    try:
        write_atomically(Path(f"/proc/{other.pid}/fd/1"), b"page\n")
    finally:
        other.kill()
        other.wait()
    assert (tmp_path / "out").read_text() == "earlier\npage\n"
    assert names(tmp_path) == ["out"]


def test_folders_sockets_and_disks_are_refused_and_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
    refused = {"folder": "a folder", "socket": "a socket", ".": "a folder", "folder/..": "a folder"}
    try:
        os.mknod("disk", 0o600 | stat.S_IFBLK, os.makedev(7, 255))
        refused["disk"] = "a block device"
    except OSError:
        pass  # only root makes device nodes
    before = {name: os.lstat(name) for name in refused}
    for name, what in refused.items():
        with pytest.raises(BadRun) as error:
            write_atomically(Path(name), b"x")
        text = str(error.value)
        assert text.startswith(f"cannot write {Path(name)}: it is {what}"), text
        assert "allowed is a file, a link to one, a FIFO" in text
        assert text.endswith("; give the path of a file")
    for name, status in before.items():
        now = os.lstat(name)
        assert (now.st_ino, now.st_mode) == (status.st_ino, status.st_mode)
    assert names(tmp_path) == sorted({"folder", "socket", "disk"} & {*refused})


def test_a_refusal_has_the_error_number_of_an_attempt_to_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
    for name in ("folder", "socket"):
        with pytest.raises(OSError) as opened:
            Path(name).write_bytes(b"")
        with pytest.raises(OSError) as refused:
            find_destination(Path(name))
        assert refused.value.errno == opened.value.errno


def test_missing_folders_and_files_in_place_of_folders(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    for path in (tmp_path / "none" / "x", tmp_path / "file" / "x"):
        with pytest.raises(BadRun, match="cannot write"):
            write_atomically(path, b"x")
    with pytest.raises(BadRun, match="it is not a folder"):
        create_folder(tmp_path / "file")
    with pytest.raises(BadRun, match="cannot create the folder"):
        write_text_atomically(tmp_path / "file" / "x" / "y", "x", parents=True)
    write_text_atomically(tmp_path / "a" / "b" / "x", "text", parents=True)
    assert (tmp_path / "a" / "b" / "x").read_text() == "text"
    assert (tmp_path / "file").read_bytes() == b"old"


def test_names_that_are_not_utf8_and_long_names_are_written(tmp_path: Path) -> None:
    for raw in (b"\xff\xfe.html", b"x" * 255, "é".encode() * 127, b"-"):
        path = tmp_path / os.fsdecode(raw)
        for data in (b"old", b"new"):
            write_atomically(path, data)
        assert path.read_bytes() == b"new"
        path.unlink()
    assert names(tmp_path) == []


def test_text_with_bytes_of_a_file_name_becomes_an_escape(tmp_path: Path) -> None:
    write_text_atomically(tmp_path / "page", os.fsdecode(b"caf\xff \xc3\xa9"))
    assert (tmp_path / "page").read_text("utf-8") == "caf\\udcff é"


def test_streams_are_told_from_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_bytes(b"")
    streams = [tmp_path / "fifo", Path("/dev/stdout"), Path("/dev/fd/2")]
    files = [tmp_path / "file", tmp_path / "new", tmp_path, tmp_path / "none" / "x"]
    assert all(map(is_stream, streams))
    assert not any(map(is_stream, files))
    assert find_destination(Path("/dev/stdout")).descriptor == 1
