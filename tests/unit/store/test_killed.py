"""Killed and concurrent writers: the store opens, and its records are complete or absent."""

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

# Python 3.12 warns of forks in processes with threads, as the test runner's; the child only writes
# files.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def _record_forever(root: Path, generation: int, pipe: int) -> None:
    """Record distinct cubins and write each original to ``pipe``.

    Large cubins make it likely that the kill interrupts a write.
    """
    store = Store(root)
    number = 0
    while True:
        original = struct.pack("<II", generation, number)
        keep(store, original * random.choice((2, 50_000)), original=original)
        os.write(pipe, original)
        number += 1


def _record_until_killed(root: Path, generation: int, seconds: float, *, wait: bool) -> list[bytes]:
    """Run a child that records in a loop, kill it, and return the originals that it recorded.

    The kill comes ``seconds`` after the child's start, or with ``wait`` after its first record.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            _record_forever(root, generation, write)
        finally:
            os._exit(1)
    os.close(write)
    first = os.read(read, 8) if wait else b""
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the child ended before the kill"
    with os.fdopen(read, "rb") as pipe:
        output = first + pipe.read()
    return [output[i : i + 8] for i in range(0, len(output), 8)]


@pytest.mark.slow
def test_writers_killed_at_random_times(tmp_path: Path) -> None:
    store = Store(tmp_path)
    rng = random.Random(7)
    recorded: list[bytes] = []
    for generation in range(KILLS):
        seconds = rng.uniform(0.0, 0.04)
        recorded += _record_until_killed(tmp_path, generation, seconds, wait=generation % 4 != 0)
        rows = store.rows()
        assert len(rows) >= len(recorded)
        for row in rows[-3:]:
            store.provenance(row)
    assert len(recorded) >= KILLS * 3 // 4
    for original in recorded:
        cubin = store.lookup(original, gpu=GPU).cubin
        assert cubin is not None
        assert cubin.data[:8] == original
    for row in store.rows():
        assert store.artefacts.get(row.optimised, "cubin")
        store.provenance(row)


def _record_some(root: Path, writer: int) -> None:
    for number in range(10):
        keep(Store(root), f"{writer} {number % 7}".encode())


def test_concurrent_writers(tmp_path: Path) -> None:
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


def test_temporary_files_of_killed_writers_are_deleted(tmp_path: Path) -> None:
    store = Store(tmp_path)
    keep(store, b"one")
    old, new = tmp_path / "objects" / "tmp" / "old", tmp_path / "objects" / "tmp" / "new"
    for path in (old, new):
        path.write_bytes(b"cut o")
    os.utime(old, (0, 0))
    keep(store, b"two")
    assert not old.exists()
    assert new.exists()
