"""Kill writers of a store, fill its disk and damage its index; count lost records and wrong bytes.

    python -m benchmarks run store.soak --kills 600 --out benchmarks/store/results/soak.json

Twenty processes record, look up and remove records in one store.  A parent kills them with SIGKILL
at random moments and starts new ones.  The store is on a small file system in memory (if this user
may mount one), so writes also fail because the disk is full.  From time to time all processes are
killed, and every acknowledged record is looked for; then the index is damaged in one of several
ways, look-ups must not serve wrong bytes, and after ``repair`` all acknowledged records are looked
for again.

A record is acknowledged when ``record`` has returned and the parent has been told.  A removal that
a kill interrupts may have happened or not; its record is not counted.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import save
from nostall.store import BadStore, ComparisonRecord, Provenance, Store, Verification
from nostall.store.artefacts import CUBIN, JSON, RECIPE, content_hash
from nostall.store.repair import repair

GPU = "soak"
DISK_MIB = 24
SHARED = 40
"""Number of records that all processes write, so that they share files."""
_SIZES = (40, 3_000, 150_000)
"""Bytes of a cubin."""
_COMPARISON = ComparisonRecord(
    ratio=1.1, low=1.05, high=1.15, null_low=0.99, null_high=1.01, triples=9, verdict="faster"
)
_VERIFIED = Verification(safe=True, checked=1, nostall="0", nvdisasm="0")


def content(key: str, part: str) -> bytes:
    """The original, the optimised cubin or the recipe of a record: a function of its key."""
    seed = hashlib.sha256(f"{key} {part}".encode()).digest()
    return seed + random.Random(seed).randbytes(_SIZES[seed[0] % len(_SIZES)])


def recipe(key: str) -> bytes | None:
    """The recipe of a record: half of the records, by their key, name a third file."""
    data = content(key, "recipe")
    return data if data[0] % 2 else None


def provenance(key: str) -> Provenance:
    """The provenance of a record; the kernel's name is the key."""
    own_recipe = recipe(key)
    return Provenance(
        original=content_hash(content(key, "original")),
        optimised=content_hash(content(key, "optimised")),
        recipe=None if own_recipe is None else content_hash(own_recipe),
        kernel=key,
        origin="soak",
        architecture="sm_90",
        kind="measured",
        ratio=1.1,
        gpu=GPU,
        device={},
        toolchain={},
        launch=None,
        verified=_VERIFIED,
        comparison=_COMPARISON,
        settings={},
        notes=(),
        created="2026-11-21T00:00:00+00:00",
    )


def record(store: Store, key: str) -> None:
    """Record the files of a key."""
    original, optimised = content(key, "original"), content(key, "optimised")
    store.record(original, optimised, provenance(key), recipe=recipe(key))


def work(root: Path, number: int, channel: Connection) -> None:
    """Record, look up and remove until killed; tells the parent what is done."""
    store, rng = Store(root), random.Random(number)
    own: list[str] = []
    count = 0

    def tell(kind: str, key: str) -> None:
        channel.send_bytes(f"{kind}{key}".encode())

    while True:
        draw = rng.random()
        try:
            if draw < 0.45:
                is_shared = rng.random() < 0.2
                key = f"shared-{rng.randrange(SHARED)}" if is_shared else f"{number}-{count}"
                count += not is_shared
                record(store, key)
                tell("+", key)
                own += [] if is_shared else [key]
            elif draw < 0.6 and own:
                key = own.pop(rng.randrange(len(own)))
                (row,) = store.find(content_hash(content(key, "original")))
                tell("?", key)
                store.remove(row)
                tell("-", key)
            else:
                key = rng.choice(own) if own else f"shared-{rng.randrange(SHARED)}"
                found = store.lookup(content(key, "original"), gpu=GPU).cubin
                if found is not None and found.data != content(key, "optimised"):
                    tell("!", key)
                tell("=", key)
        except BadStore as error:
            full = "free space" in str(error) or "full" in str(error)
            tell("f" if full else "e", str(error)[:300])


@dataclass
class Counts:
    """What happened; the fields are keys of the result file."""

    kills: int = 0
    acknowledged: int = 0
    removed: int = 0
    lookups: int = 0
    full_disk_errors: int = 0
    other_errors: int = 0
    damages: dict[str, int] = field(default_factory=dict[str, int])
    """Damaged indexes by kind."""
    checked: int = 0
    """Acknowledged records that were looked for, over all rounds."""
    lost: int = 0
    """Acknowledged records that were not found, or only with other content."""
    wrong_bytes: int = 0
    """Look-ups that served another cubin than the recorded one."""
    leftovers: int = 0
    """Temporary files that are older than the store's limit after a write, and stay."""
    examples: list[str] = field(default_factory=list[str])


class Soak:
    """The processes, what they acknowledged, and the counts."""

    def __init__(self, root: Path, processes: int, seed: int) -> None:
        self.root, self.processes, self.rng = root, processes, random.Random(seed)
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload([__name__])
        self.workers: dict[Connection, Any] = {}
        self.acknowledged: set[str] = set()
        self.counts = Counts()
        self._number = 0

    def start(self) -> None:
        """Start processes until all are there."""
        while len(self.workers) < self.processes:
            receive, send = self.context.Pipe(duplex=False)
            self._number += 1
            process = self.context.Process(target=work, args=(self.root, self._number, send))
            process.start()
            send.close()
            self.workers[receive] = process

    def kill(self, channel: Connection) -> None:
        """Kill one process, and read all that it told."""
        process = self.workers.pop(channel)
        process.kill()
        process.join()
        with suppress(EOFError):
            while True:
                self._take(channel.recv_bytes())
        channel.close()
        self.counts.kills += 1

    def run(self, seconds: float) -> None:
        """Read what the processes tell for some time."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for channel in wait(list(self.workers), timeout=left):
                assert isinstance(channel, Connection)
                try:
                    self._take(channel.recv_bytes())
                except EOFError:
                    raise RuntimeError("a process ended that was not killed") from None

    def kill_all(self) -> None:
        for channel in list(self.workers):
            self.kill(channel)

    def _take(self, message: bytes) -> None:
        kind, key = message[:1].decode(), message[1:].decode()
        counts = self.counts
        if kind == "+":
            self.acknowledged.add(key)
            counts.acknowledged += 1
        elif kind == "?":
            self.acknowledged.discard(key)
        elif kind == "-":
            counts.removed += 1
        elif kind == "=":
            counts.lookups += 1
        elif kind == "!":
            counts.wrong_bytes += 1
            counts.examples.append(f"wrong bytes for {key}")
        elif kind == "f":
            counts.full_disk_errors += 1
        else:
            counts.other_errors += 1
            counts.examples.append(key)

    def check(self, moment: str) -> None:
        """Look for every acknowledged record."""
        store = Store(self.root)
        for key in sorted(self.acknowledged):
            self.counts.checked += 1
            expected = content(key, "optimised")
            try:
                found = store.lookup(content(key, "original"), gpu=GPU).cubin
                problem = "" if found is not None and found.data == expected else "not found"
                problem = problem or _recipe_problem(store, key)
            except BadStore as error:
                problem = str(error)
            if problem:
                self.counts.lost += 1
                self.counts.examples.append(f"{moment}: {key}: {problem}"[:300])

    def damage(self, kind: str) -> None:
        """Damage the index, look at what is served, and repair."""
        store = Store(self.root)
        DAMAGES[kind](store.index.path, self.rng)
        self.counts.damages[kind] = self.counts.damages.get(kind, 0) + 1
        for key in sorted(self.acknowledged)[:50]:
            with suppress(BadStore):
                found = store.lookup(content(key, "original"), gpu=GPU).cubin
                if found is not None and found.data != content(key, "optimised"):
                    self.counts.wrong_bytes += 1
        repair(store)

    def make_room(self) -> None:
        """Remove records until a fifth of the disk is free, as a user would on a full disk."""
        store = Store(self.root)
        for key in sorted(key for key in self.acknowledged if not key.startswith("shared")):
            usage = os.statvfs(self.root)
            if usage.f_bavail > usage.f_blocks / 5:
                return
            self.acknowledged.discard(key)
            for row in store.find(content_hash(content(key, "original"))):
                store.remove(row)
            self.counts.removed += 1

    def age(self) -> None:
        """Make all files old, so that the remains of killed writers are swept; count those left."""
        store = Store(self.root)
        for path in (self.root / "objects").rglob("*"):
            with suppress(OSError):
                os.utime(path, (0, 0))
        key = "shared-0"
        with suppress(BadStore):
            record(store, key)
            self.acknowledged.add(key)
            self.counts.leftovers += len(list(store.artefacts.temporary.iterdir()))
            named = {
                hash
                for row in store.rows()
                for hash, _ in ((row.id, JSON), *store.provenance(row).files())
            }
            files = {
                hash for suffix in (CUBIN, JSON, RECIPE) for hash in store.artefacts.names(suffix)
            }
            self.counts.leftovers += len(files - named)


def _recipe_problem(store: Store, key: str) -> str:
    """What is wrong with a record's recipe; empty if nothing is."""
    rows = store.find(content_hash(content(key, "original")))
    found = [store.contents(row).recipe for row in rows]
    return "" if found == [recipe(key)] else f"{len(rows)} records, or another recipe"


def _overwrite(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(20):
        at = rng.randrange(100, len(data))  # not the version: a newer one is refused, not repaired
        data[at : at + 16] = rng.randbytes(16)
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path, random.Random], object]] = {
    "empty": lambda path, rng: path.write_bytes(b""),
    "deleted": lambda path, rng: path.unlink(),
    "cut off": lambda path, rng: os.truncate(path, rng.randrange(path.stat().st_size)),
    "overwritten": _overwrite,
    "text": lambda path, rng: path.write_text("not a database\n"),
}


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a small file system in memory on ``folder``; whether that was possible."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "none", str(folder)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def soak(root: Path, kills: int, processes: int = 20, per_round: int = 50, seed: int = 0) -> Counts:
    """Run rounds of ``per_round`` kills until there were at least ``kills``."""
    experiment = Soak(root, processes, seed)
    kinds = list(DAMAGES)
    number = 0
    while experiment.counts.kills < kills:
        experiment.start()
        for _ in range(per_round):
            experiment.run(experiment.rng.uniform(0.0, 0.5))
            experiment.kill(experiment.rng.choice(list(experiment.workers)))
            experiment.start()
        experiment.kill_all()
        experiment.check("after kills")
        experiment.age()
        experiment.make_room()
        experiment.damage(kinds[number % len(kinds)])
        experiment.check(f"after repair of an index: {kinds[number % len(kinds)]}")
        number += 1
    return experiment.counts


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=600)
    parser.add_argument("--processes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)


def main(options: argparse.Namespace) -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nostall-") as name, small_disk(Path(name)) as mounted:
        counts = soak(Path(name) / "home", options.kills, options.processes, seed=options.seed)
    seconds = round(time.monotonic() - began, 1)
    summary = Counter({"kills": counts.kills, "lost": counts.lost, "wrong": counts.wrong_bytes})
    print(dict(summary), f"{seconds} s")
    save(
        options.out,
        processes=options.processes,
        disk_mib=DISK_MIB if mounted else None,
        seconds=seconds,
        **{**vars(counts), "examples": counts.examples[:20]},
    )
