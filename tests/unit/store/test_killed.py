"""Killed writers and many writers: the store opens, and shows records whole or not at all."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import struct
import time
from pathlib import Path

import pytest

from nostall.store import Store
from tests.unit.store.records import GPU, keep

KILLS = 60

# Python 3.12 warns of forks beside threads, which the test runner has; the child only writes files.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def _record_for_ever(root: Path, generation: int, told: int) -> None:
    """Record distinct cubins, and say so after each; a few are large enough to be cut."""
    store = Store(root)
    number = 0
    while True:
        original = struct.pack("<II", generation, number)
        keep(store, original * random.choice((2, 50_000)), original=original)
        os.write(told, original)
        number += 1


def _one_life(root: Path, generation: int, seconds: float, *, wait: bool) -> list[bytes]:
    """A child that records in a loop and is killed ``seconds`` after its start, or after its first
    record; the originals it had finished."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            _record_for_ever(root, generation, write)
        finally:
            os._exit(1)
    os.close(write)
    first = os.read(read, 8) if wait else b""
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the child ended by itself"
    with os.fdopen(read, "rb") as pipe:
        said = first + pipe.read()
    return [said[at : at + 8] for at in range(0, len(said), 8)]


def test_kill_at_any_time(tmp_path: Path) -> None:
    store = Store(tmp_path)
    chance = random.Random(7)
    finished: list[bytes] = []
    for generation in range(KILLS):
        seconds = chance.uniform(0.0, 0.04)
        finished += _one_life(tmp_path, generation, seconds, wait=generation % 4 != 0)
        rows = store.rows()
        assert len(rows) >= len(finished)
        for row in rows[-3:]:
            store.provenance(row)
    assert len(finished) >= KILLS * 3 // 4
    for original in finished:
        found = store.lookup(original, gpu=GPU).found
        assert found is not None
        assert found.data[:8] == original
    for row in store.rows():
        assert store.artefacts.get(row.optimised, "cubin")
        store.provenance(row)


def _record_some(root: Path, writer: int) -> None:
    for number in range(10):
        keep(Store(root), f"{writer} {number % 7}".encode())


def test_many_writers(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_record_some, args=(tmp_path, n)) for n in range(6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * 6
    store = Store(tmp_path)
    assert len(store.rows()) == 6 * 7
    for row in store.rows():
        store.provenance(row)


def test_what_killed_writers_left_is_swept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    keep(store, b"one")
    old, new = tmp_path / "objects" / "tmp" / "old", tmp_path / "objects" / "tmp" / "new"
    for path in (old, new):
        path.write_bytes(b"cut o")
    os.utime(old, (0, 0))
    keep(store, b"two")
    assert not old.exists()
    assert new.exists()
