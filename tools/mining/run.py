"""Mine sources in turn: read their functions, count sightings batch by batch, write checkpoints."""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tools.mining.archive import source_name
from tools.mining.count import SightingCounter
from tools.mining.functions import CodeFunction, read_source
from tools.mining.marks import Marks
from tools.mining.store import Store
from tools.mining.tallies import Tallies

BATCH_INSTRUCTIONS = 40_000
"""Instructions that are disassembled at a time: nvdisasm needs about 3 KB for each."""
BATCH_FUNCTIONS = 200
CHECKPOINT_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Options:
    """How to mine."""

    limit: int
    """Functions of each source and architecture that are drawn at random."""
    max_size: int
    """Instructions of the largest function that is drawn and mined."""
    seconds: float
    """Time after which no further batch begins."""
    workers: int


@dataclass(frozen=True, slots=True)
class _Batch:
    source: str
    sm: int
    functions: tuple[CodeFunction, ...]
    duplicates: int
    """Functions of the sample that the batch leaves out because they were taken already."""
    larger: int
    """Functions of the sample that the batch leaves out because of their size."""


@dataclass(frozen=True, slots=True)
class _Result:
    tallies: Tallies
    marks: Marks


def mine(paths: Sequence[Path], store: Store, options: Options) -> None:
    """Mine the sources ``paths``; the results are in ``store``."""
    deadline = time.monotonic() + options.seconds
    for path in paths:
        name = source_name(path)
        if name not in store.checkpoint.sources:
            _say(f"reading {name}")
            seed = store.checkpoint.seed
            store.add_source(name, read_source(path, seed, options.limit, options.max_size))
            record = store.checkpoint.sources[name]
            counts = ", ".join(f"sm_{sm} {n}" for sm, n in sorted(record.contents.distinct.items()))
            _say(f"{name}: different functions: {counts}")
    names = [source_name(path) for path in paths]
    saved = time.monotonic()
    if options.seconds <= 0:
        return
    for batch, result in _results(
        _batches(names, store, options.max_size), deadline, options.workers, store
    ):
        _record(batch, result, store)
        if time.monotonic() - saved > CHECKPOINT_SECONDS:
            store.save()
            saved = time.monotonic()
        _show_progress(store, deadline)
    store.save()
    _say("")


def _batches(names: Sequence[str], store: Store, max_size: int) -> Iterator[_Batch]:
    """Batches of all sources and architectures in turn, so a part of them is representative."""
    checkpoint = store.checkpoint
    pending = set(checkpoint.seen)
    queue = deque(
        (name, sm, _unmined(store, name, sm))
        for name in names
        for sm in checkpoint.sources[name].sampled
    )
    while queue:
        name, sm, functions = queue.popleft()
        duplicates, larger, size, chosen = 0, 0, 0, list[CodeFunction]()
        for function in functions:
            if function.key in pending:
                duplicates += 1
                continue
            if function.size > max_size:
                larger += 1
                continue
            pending.add(function.key)
            chosen.append(function)
            size += function.size
            if size >= BATCH_INSTRUCTIONS or len(chosen) >= BATCH_FUNCTIONS:
                break
        if duplicates or larger or chosen:
            queue.append((name, sm, functions))
            yield _Batch(name, sm, tuple(chosen), duplicates, larger)


def _unmined(store: Store, name: str, sm: int) -> Iterator[CodeFunction]:
    """The functions of a sample that were not taken; read from disk a batch at a time."""
    position = store.checkpoint.sources[name].taken[sm]
    while True:
        functions = store.sample(name, sm)[position : position + 4 * BATCH_FUNCTIONS]
        if not functions:
            return
        position += len(functions)
        yield from functions


def _results(
    batches: Iterator[_Batch], deadline: float, workers: int, store: Store
) -> Iterator[tuple[_Batch, _Result]]:
    """Mine the batches until the deadline, in this process or in several."""
    _counters.clear()
    for sm, marks in store.checkpoint.marks.items():
        _counters[sm] = SightingCounter(sm, marks)
    if workers == 1:
        for batch in batches:
            yield batch, _mine_batch(batch)
            if time.monotonic() >= deadline:
                return
        return
    with ProcessPoolExecutor(workers) as pool:
        running: deque[tuple[_Batch, Future[_Result]]] = deque()
        for batch in batches:
            running.append((batch, pool.submit(_mine_batch, batch)))
            if len(running) >= 2 * workers:
                done, future = running.popleft()
                yield done, future.result()
            if time.monotonic() >= deadline:
                break
        for done, future in running:
            yield done, future.result()


_counters: dict[int, SightingCounter] = {}
"""The counters of this process: what they learnt serves all batches of an architecture."""


def _mine_batch(batch: _Batch) -> _Result:
    counter = _counters.setdefault(batch.sm, SightingCounter(batch.sm))
    counter.tallies = Tallies()
    if batch.functions:
        counter.add(batch.functions)
    return _Result(counter.tallies, counter.marks)


def _record(batch: _Batch, result: _Result, store: Store) -> None:
    checkpoint = store.checkpoint
    record = checkpoint.sources[batch.source]
    record.taken[batch.sm] += len(batch.functions) + batch.duplicates + batch.larger
    checkpoint.seen.update(f.key for f in batch.functions)
    checkpoint.duplicates += batch.duplicates
    record.cuda.setdefault(batch.sm, Counter()).update(f.cuda for f in batch.functions)
    checkpoint.tallies.setdefault(batch.sm, Tallies()).add(result.tallies)
    checkpoint.marks[batch.sm] = result.marks


def _show_progress(store: Store, deadline: float) -> None:
    """One line about the progress: on a terminal the line is rewritten."""
    functions = ", ".join(
        f"sm_{sm} {t.functions}" for sm, t in sorted(store.checkpoint.tallies.items())
    )
    instructions = sum(t.instructions for t in store.checkpoint.tallies.values())
    remaining = max(0.0, deadline - time.monotonic())
    line = f"functions: {functions}; {instructions} instructions; {remaining:.0f} s left"
    if sys.stderr.isatty():
        print(f"\r{line}", end="", file=sys.stderr, flush=True)
    else:
        _say(line)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
