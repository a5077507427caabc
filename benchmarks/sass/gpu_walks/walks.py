"""Walks of legal moves over the kernels of the corpus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nostall.sass import Program
from nostall.sass.schedule import Schedule, ScheduleSpace
from nostall.sass.schedule.mobility import lower_stalls

CORPUS = Path(__file__).resolve().parents[3] / ".cache" / "corpus" / "triton-3.6.0"


class Task(NamedTuple):
    """One walk of one kernel."""

    name: str
    tighten: bool
    """Whether moves that lengthen the schedule are skipped, and stalls are lowered at the end."""
    seed: int
    moves: int


class WalkEnd(NamedTuple):
    """Last schedule of a walk."""

    task: Task
    state: str
    """The schedule, as :meth:`ScheduleSpace.dump` writes it."""
    cycles: tuple[int, int]
    """Sum of stall counts before and after the walk."""


def kernel_names(largest: int, match: str = "") -> list[str]:
    """The sm_90 kernels with a launch whose cubins have at most ``largest`` bytes."""
    return [
        path.stem
        for path in sorted(CORPUS.glob("*.sm_90.cubin"))
        if path.stat().st_size <= largest
        and corpus_entry(path.stem).get("launch")
        and match in path.stem
    ]


def corpus_entry(name: str) -> dict[str, Any]:
    """Kernel name and launch of a cubin, from the index of the corpus."""
    entry: dict[str, Any] = _index()[name]
    return entry


def original(name: str) -> bytes:
    """The compiler's cubin of a kernel."""
    return (CORPUS / f"{name}.cubin").read_bytes()


def open_space(name: str, *, measured_latencies: bool) -> ScheduleSpace:
    """The schedules of a kernel."""
    program = Program.from_cubin(original(name))
    function = program.kernel(corpus_entry(name)["kernel"])
    return ScheduleSpace(program, function, measured_latencies=measured_latencies)


def tasks_of(name: str, walks: int, moves: int, seed: int) -> list[Task]:
    """The walks of a kernel: ``walks`` of each kind."""
    return [
        Task(name, tighten, seed + k, moves * (1 + 2 * tighten))
        for tighten in (False, True)
        for k in range(walks)
    ]


def walk(space: ScheduleSpace, task: Task) -> Iterator[tuple[Schedule, str]]:
    """States of a walk, with the move that led to each."""
    state, rng = space.start(), np.random.default_rng(task.seed)
    yield state, "start"
    length = int(state.stall.sum())
    for _ in range(task.moves):
        move = space.propose(state, rng)
        if move is None:
            return
        after = space.apply(state, move)
        if task.tighten and int(after.stall.sum()) > length:
            continue
        state, length = after, int(after.stall.sum())
        yield state, str(move)
    if task.tighten:
        order = rng.permutation(len(space.function.instructions)).astype(np.int32)
        yield from lower_stalls(space, state, order)


def walk_to_end(space: ScheduleSpace, task: Task) -> WalkEnd:
    """Do a walk; returns its last schedule."""
    states = [state for state, _ in walk(space, task)]
    cycles = (int(states[0].stall.sum()), int(states[-1].stall.sum()))
    return WalkEnd(task, space.dump(states[-1]), cycles)


@cache
def _index() -> dict[str, Any]:
    index: dict[str, Any] = json.loads((CORPUS / "index.json").read_text())
    return index
