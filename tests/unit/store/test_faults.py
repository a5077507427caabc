"""Faults of the surroundings: a full disk, links, modes, and remains of killed writers."""

from __future__ import annotations

import errno
import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nostall.store import BadStore, Row, Store
from nostall.store.artefacts import content_hash
from tests.unit.store.records import GPU, ORIGINAL, keep

DISK_BYTES = 2 << 20


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False)
    except OSError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def _files(store: Store) -> set[Path]:
    return {path for path in (store.root / "objects").rglob("*") if path.is_file()}


def _fill(store: Store) -> list[Row]:
    """Record until the disk is full, and on; the records that were accepted."""
    rows, rng = [], random.Random(3)
    for _ in range(60):
        original, optimised = rng.randbytes(50_000), rng.randbytes(50_000)
        try:
            rows.append(keep(store, optimised, original=original))
        except BadStore as error:
            assert "free space" in str(error) or "set NOSTALL_HOME" in str(error)
    return rows


def test_a_full_disk_leaves_no_files_and_lets_records_be_removed(full_disk: Path) -> None:
    store = Store(full_disk / "home")
    rows = _fill(store)
    assert 5 < len(rows) < 40
    assert list(store.artefacts.temporary.iterdir()) == []
    assert store.rows() == sorted(rows, key=lambda row: (row.created, row.id))
    for row in rows:
        assert content_hash(store.artefacts.get(row.optimised, "cubin")) == row.optimised
    filler = full_disk / "filler"
    with pytest.raises(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 512)
    for number, row in enumerate(rows):
        store.remove(row)
        assert len(store.rows()) == len(rows) - number - 1
    assert _files(store) == set()
    assert store.lookup(ORIGINAL, gpu=GPU).cubin is None


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_write_leaves_no_files(
    store: Store, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    keep(store, b"first")
    before = _files(store)
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail) if failing == "fsync" else patch.setattr(
            Path, "replace", fail
        )
        with pytest.raises(BadStore, match="free space with `nostall store rm`"):
            keep(store, b"second", original=b"other")
    assert _files(store) == before


def test_files_of_records_that_were_not_added_are_deleted(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(store, b"first")
    before = _files(store)

    def fail(rows: object) -> None:
        raise BadStore("the index cannot be written")

    with monkeypatch.context() as patch:
        patch.setattr(store.index, "add", fail)
        with pytest.raises(BadStore, match="the index cannot be written"):
            keep(store, b"second", original=ORIGINAL)
    assert _files(store) == before
    assert store.lookup(ORIGINAL, gpu=GPU).cubin is not None


def test_old_files_that_no_record_names_are_deleted(store: Store) -> None:
    row = keep(store, b"first")
    old, young = (store.artefacts.file(data, "cubin") for data in (b"old", b"young"))
    foreign = store.root / "objects" / "notes.txt"
    foreign.write_text("mine")
    for path in (old, foreign, store.artefacts.path(row.optimised, "cubin")):
        os.utime(path, (0, 0))
    keep(store, b"second")
    assert not old.exists() and young.exists() and foreign.exists()
    assert store.artefacts.get(row.optimised, "cubin") == b"first"


def test_nothing_is_deleted_beside_a_damaged_index(store: Store) -> None:
    row = keep(store, b"first")
    for path in _files(store):
        os.utime(path, (0, 0))
    store.index.path.write_bytes(b"")
    before = _files(store)
    for change in (lambda: keep(store, b"second"), lambda: store.remove(row)):
        with pytest.raises(BadStore, match="store repair"):
            change()
    assert _files(store) == before


def test_the_lock_does_not_follow_links(store: Store, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("mine")
    store.root.mkdir()
    (store.root / "lock").symlink_to(target)
    with pytest.raises(BadStore, match="symbolic link"):
        keep(store, b"first")
    assert target.read_text() == "mine"
    assert store.rows() == []


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_modes_follow_the_umask(store: Store, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        keep(store, b"first")
    finally:
        os.umask(before)
    files = [path for path in store.root.rglob("*") if path.is_file()]
    assert len(files) >= 5
    assert {path.name: path.stat().st_mode & 0o777 for path in files} == {
        path.name: mode for path in files
    }
    folders = [store.root, *(path for path in store.root.rglob("*") if path.is_dir())]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o777 & ~umask}
