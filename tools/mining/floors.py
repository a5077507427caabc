"""Mine latency tables from compiler output.

    python -m tools.mining.floors --out src/nostall/sass/safety/floors FILE.cubin ...

The input is cubins from compilers.  For each fixed-latency producer and each instruction that
accesses its registers while they may be in flight, the smallest issue distance is recorded: over
all paths for the class of the pair (*floors*), and in straight-line code for the exact pair
(*attested*).  Compilers keep the distances that the hardware needs, so the
smallest distance in enough code is safe for other code.

Only straight-line code attests, and only pairs with no wait between them.  A wait lasts an unknown
number of cycles, so a distance across a wait proves nothing.  For the other pairs the compiler
relied on the distance alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

from nostall.core.errors import BadBinary
from nostall.core.files.atomic import create_folder, write_text_atomically
from nostall.sass.binary.encoding import Control
from nostall.sass.program import Function, Program, registers
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Pipe, lookup
from nostall.sass.safety import pairing
from nostall.sass.safety.hazards.dataflow import (
    Conflict,
    entry_states,
    find_conflicts,
    step_through,
)
from nostall.sass.safety.hazards.facts import instruction_facts, register_numbers
from nostall.sass.safety.latency import BARRIER_REACH, FAMILY
from tools.typed_file import read_typed, write_typed

ALU_HORIZON = 24
"""Cycles up to which distances between register accesses are counted."""

MATRIX_HORIZON = 40
"""The same for accesses by matrix instructions, whose results take up to 35 cycles."""

BarrierSide = Literal["AFTER", "BEFORE"]
"""Whether an instruction is after or before a scheduling barrier."""

Sightings = Counter[tuple[str, str, str, int]]
"""(kind of pair, exact name, coarse name, distance in cycles) -> number of occurrences."""


class Sighting(NamedTuple):
    """Two instructions whose order only their issue distance keeps."""

    kind: pairing.HazardKind | BarrierSide
    first: Instruction
    """The earlier instruction; the barrier for AFTER and BEFORE."""
    second: Instruction
    register: int
    """The register that both access; -1 for AFTER and BEFORE."""
    cycles: int


@dataclass(slots=True)
class _Issue:
    """The issue of one instruction."""

    position: int
    cycle: int
    """Cycles since the start of the block."""
    waits: int
    """Waits in the block so far, its own included."""
    instruction: Instruction


@dataclass(slots=True)
class _BlockState:
    """Earlier issues of a block that later instructions can form a pair with."""

    cycle: int = 0
    waits: int = 0
    recent: list[_Issue] = field(default_factory=list[_Issue])
    """Issues of the last BARRIER_REACH cycles."""
    writers: dict[int, list[_Issue]] = field(default_factory=dict[int, list[_Issue]])
    """Register -> its last writer, if that has fixed latency."""
    readers: dict[int, list[_Issue]] = field(default_factory=dict[int, list[_Issue]])
    """Register -> its fixed-latency readers since the last write."""
    predicate_writes: dict[int, int] = field(default_factory=dict[int, int])
    """Predicate -> position of the last instruction that writes it."""


def count_distances(order: Sequence[Instruction], sm: int, sightings: Sightings) -> None:
    """Add the distances in one block, whose instructions are ``order``, to ``sightings``."""
    for kind, first, second, register, cycles in find_sightings(
        ((i, i.control) for i in order), sm
    ):
        if kind == "AFTER" or kind == "BEFORE":
            sightings[kind, *pairing.barrier_pair(first, second), cycles] += 1
            continue
        coarse_name = pairing.coarse_names(first, second, register, kind)[1]
        for name in pairing.exact_names(first, second, register, kind):
            sightings[kind, name, coarse_name, cycles] += 1


def find_sightings(block: Iterable[tuple[Instruction, Control]], sm: int) -> Iterator[Sighting]:
    """The pairs in one block; ``block`` has each instruction with its control word."""
    state = _BlockState()
    for position, (instruction, control) in enumerate(block):
        state.waits += bool(control.wait or instruction.base == "DEPBAR")
        issue = _Issue(position, state.cycle, state.waits, instruction)
        if not instruction.never_executes:
            yield from _barrier_pairs(issue, state)
            yield from _register_pairs(issue, state, sm)
        # A barrier and the DRAIN form wait for an unknown time after their own issue.
        state.waits += bool(instruction.is_barrier or control.stall == 0)
        state.cycle += control.stall


def _barrier_pairs(second: _Issue, state: _BlockState) -> Iterator[Sighting]:
    """The pairs of an instruction with a scheduling barrier.

    A barrier counts as one wait itself, after its own issue.
    """
    state.recent = [issue for issue in state.recent if second.cycle - issue.cycle <= BARRIER_REACH]
    later = second.instruction
    for first in state.recent:
        earlier, cycles = first.instruction, second.cycle - first.cycle
        if earlier.is_barrier:
            if first.waits + 1 == second.waits:
                yield Sighting("AFTER", earlier, later, -1, cycles)
        elif later.is_barrier and first.waits == second.waits:
            yield Sighting("BEFORE", later, earlier, -1, cycles)
    state.recent.append(second)


def _register_pairs(second: _Issue, state: _BlockState, sm: int) -> Iterator[Sighting]:
    """The pairs of an instruction with fixed-latency accesses of the same registers."""
    instruction = second.instruction
    for register in instruction.uses:
        for first in state.writers.get(register, ()):
            if _counts(first, second, state):
                cycles = second.cycle - first.cycle
                yield Sighting("RAW", first.instruction, instruction, register, cycles)
    for register in instruction.defs:
        for kind, accesses in (("WAW", state.writers), ("WAR", state.readers)):
            for first in accesses.get(register, ()):
                if _counts(first, second, state):
                    cycles = second.cycle - first.cycle
                    yield Sighting(kind, first.instruction, instruction, register, cycles)  # type: ignore[arg-type]
    has_fixed_latency = instruction.has_fixed_latency(sm)
    for register in instruction.defs:
        state.writers[register] = [second] if has_fixed_latency else []
        state.readers[register] = []
        if registers.is_predicate(register):
            state.predicate_writes[register] = second.position
    if has_fixed_latency:
        for register in instruction.uses:
            state.readers.setdefault(register, []).append(second)


def _counts(first: _Issue, second: _Issue, state: _BlockState) -> bool:
    """Whether only the distance protects a pair.

    The first instruction must execute whenever the second one does: it has no guard, or the two
    have the same guard, whose predicate does not change between them.
    """
    is_matrix = first.instruction.pipe is Pipe.MMA
    horizon = MATRIX_HORIZON if is_matrix else ALU_HORIZON
    if second.cycle - first.cycle > horizon or first.waits != second.waits:
        return False
    guard = first.instruction.guard
    if guard is None:
        return True
    return guard == second.instruction.guard and all(
        state.predicate_writes.get(register, -1) < first.position
        for register in first.instruction.guard_registers
    )


HORIZON = 48
"""Cycles up to which distances are recorded; longer ones say nothing about latency."""

MIN_SEEN_FOR_PAIR = 3
"""Occurrences at or below a distance from which the distance counts as attested."""

MIN_SEEN_FOR_CLASS = 60
"""Occurrences of an exact pair from which it counts for its class of pairs."""

MIN_SEEN_FOR_PRODUCER = 10
"""Occurrences of an exact pair from which it counts for its producer."""

MIN_SEEN_FOR_CEILING = 100
"""Occurrences of a read from which it counts for the maximum latency of its producer class."""

Distances = Counter[tuple[str, str, int]]
"""(kind of pair, coarse name, distance in cycles) -> number of occurrences."""

Rows = dict[str, dict[str, list[int]]]
"""Kind of pair -> name of the pair -> [smallest distance, number of occurrences]."""


@dataclass(slots=True)
class Observations:
    """Distances seen in the code of one architecture family."""

    floors: Distances = field(default_factory=Counter)
    """Over all paths."""
    sightings: Sightings = field(default_factory=Counter)
    """In straight-line code with no other protection."""
    cubins: int = 0
    instructions: int = 0

    def add(self, more: Observations) -> None:
        """Add further observations of the same family."""
        self.floors.update(more.floors)
        self.sightings.update(more.sightings)
        self.cubins += more.cubins
        self.instructions += more.instructions


def observe_cubin(data: bytes) -> tuple[int, Observations]:
    """(architecture, distances) of one cubin."""
    program = Program.from_cubin(data)
    count = sum(len(f.instructions) for f in program.functions)
    observations = Observations(cubins=1, instructions=count)
    for function in program.functions:
        _observe_function(function, program.sm, observations)
    return program.sm, observations


def _observe_function(function: Function, sm: int, observations: Observations) -> None:
    """Add the distances in one function to ``observations``."""
    order = function.instructions
    facts = {i.index: instruction_facts(i, sm, HORIZON) for i in order}
    entries = entry_states(function.blocks, order, facts)
    for block, state in zip(function.blocks, entries, strict=True):
        instructions = order[block.start : block.end]
        count_distances(instructions, sm, observations.sightings)
        for first, second in pairwise(instructions):
            pair = pairing.pipe_pair(first, second)
            observations.floors["ISSUE", pair, first.control.stall] += 1
        for current, in_flight, _ in step_through(state, block, order, facts):
            for conflict in find_conflicts(current, in_flight, facts):
                if conflict.first.fixed_latency:
                    _count_conflict(conflict, observations.floors)


def _count_conflict(conflict: Conflict, distances: Distances) -> None:
    first, second = conflict.first.instruction, conflict.second.instruction
    names: set[str] = set()
    for register in register_numbers(conflict.registers):
        names.update(pairing.coarse_names(first, second, register, conflict.kind))
    for name in names:
        distances[conflict.kind, name, conflict.item.elapsed] += 1


def floor_rows(distances: Distances) -> Rows:
    """The smallest distance of each class of pairs, and how often the class was seen."""
    grouped: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    for (kind, name, distance), count in distances.items():
        grouped[kind, name][distance] += count
    rows: Rows = {}
    for (kind, name), counts in sorted(grouped.items()):
        rows.setdefault(kind, {})[name] = [min(counts), counts.total()]
    return rows


def attested_rows(sightings: Sightings) -> tuple[Rows, Rows]:
    """(smallest attested distance of each exact pair, largest one of each class and producer)."""
    grouped: dict[tuple[str, str, str], Counter[int]] = defaultdict(Counter)
    for (kind, name, coarse_name, distance), count in sightings.items():
        grouped[kind, name, coarse_name][distance] += count
    exact: Rows = {}
    sufficient: Rows = {}
    for (kind, name, coarse_name), counts in sorted(grouped.items()):
        attested = _attested_distance(counts)
        if attested is None:
            continue
        known = exact.setdefault(kind, {}).get(name)
        smallest = attested if known is None else min(attested, known[0])
        exact[kind][name] = [smallest, counts.total() + (known[1] if known else 0)]
        producer = name.partition("|")[0]
        for group, min_seen in (
            (coarse_name, MIN_SEEN_FOR_CLASS),
            (producer, MIN_SEEN_FOR_PRODUCER),
        ):
            if counts.total() >= min_seen:
                row = sufficient.setdefault(kind, {}).setdefault(group, [0, 0])
                row[:] = [max(row[0], attested), row[1] + counts.total()]
    return exact, sufficient


def ceilings(floors: Rows, exact: Rows) -> dict[str, int]:
    """For each producer class the largest distance that a common read of it needs."""
    by_class: dict[str, int] = {}
    for rows in (floors, exact):
        for name, (distance, seen) in rows.get("RAW", {}).items():
            if seen >= MIN_SEEN_FOR_CEILING and (producer := _producer_class(name)):
                by_class[producer] = max(distance, by_class.get(producer, 0))
    return dict(sorted(by_class.items()))


def _producer_class(name: str) -> str:
    """The class (pipe and register file) of the producer in the name of a producer-consumer pair.

    Names of pairs and classes are those of :mod:`.pairing`, such as ``fma>R``.
    """
    opcode, _, register = name.partition("|")[0].partition(">")
    row = lookup(opcode.partition(".")[0])
    file = register.partition("@")[0].rstrip("0123456789")
    return f"{row.pipe if row else opcode}>{file}"


def _attested_distance(counts: Counter[int]) -> int | None:
    """The smallest distance at or below which a pair was seen often enough, or None."""
    seen = 0
    for distance in sorted(counts):
        seen += counts[distance]
        if seen >= MIN_SEEN_FOR_PAIR:
            return distance
    return None


def observe_files(
    paths: Iterable[Path], cache: Path | None, workers: int = 2
) -> dict[int, Observations]:
    """Observe many cubins in parallel; returns one result for each architecture family.

    Cubins that nostall cannot read (other architectures) are skipped.  ``cache`` is a folder with
    the results of earlier runs, by content of the file.
    """
    families: dict[int, Observations] = defaultdict(Observations)
    with ProcessPoolExecutor(workers) as pool:
        for result in pool.map(partial(_observe_file, cache=cache), list(paths), chunksize=2):
            if result is not None:
                families[FAMILY[result[0]]].add(result[1])
    _share_within_generation(families)
    return families


def _share_within_generation(families: dict[int, Observations]) -> None:
    """Let sm_80 and sm_86/89 share their observations, except for matrix and FP64 units.

    Their other pipes are the same, so what was seen on one architecture holds for the other.
    """
    generation = [families[f] for f in (80, 86) if f in families]
    floors: Distances = Counter()
    sightings: Sightings = Counter()
    for family in generation:
        floors.update({key: n for key, n in family.floors.items() if not _unit_differs(key[1])})
        shared = {key: n for key, n in family.sightings.items() if not _unit_differs(key[1])}
        sightings.update(shared)
    for family in generation:
        own_floors = {key: n for key, n in family.floors.items() if _unit_differs(key[1])}
        family.floors = Counter(own_floors) + floors
        own_sightings = {key: n for key, n in family.sightings.items() if _unit_differs(key[1])}
        family.sightings = Counter(own_sightings) + sightings


def _unit_differs(name: str) -> bool:
    """Whether the producer of a pair executes in a unit that differs between sm_80 and sm_86."""
    base = name.partition("|")[0].partition(">")[0].partition(".")[0]
    row = lookup(base)
    return base in ("mma", "double") or (row is not None and row.pipe in (Pipe.MMA, Pipe.DOUBLE))


def _observe_file(path: Path, cache: Path | None) -> tuple[int, Observations] | None:
    """The observations of one file, from the cache if it is there; None if it is unreadable."""
    data = path.read_bytes()
    cached = cache / hashlib.blake2b(data, digest_size=12).hexdigest() if cache else None
    if cached is not None and cached.exists():
        return read_typed(cached, tuple[int, Observations])
    try:
        result = observe_cubin(data)
    except BadBinary:
        return None
    if cached is not None:
        write_typed(cached, result)
    return result


def _format_json(value: object, indent: str = "") -> str:
    """JSON text with one row of a table on each line."""
    if not isinstance(value, dict):
        return json.dumps(value)
    inner = indent + " "
    rows = (f"{inner}{json.dumps(key)}: {_format_json(item, inner)}" for key, item in value.items())
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"


def main() -> None:
    """Write one latency table for each architecture family."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder for the tables")
    parser.add_argument("--source", default="", help="where the cubins come from, for the header")
    parser.add_argument("--cache", type=Path, help="a folder that keeps the result of each cubin")
    parser.add_argument("files", nargs="+", type=Path, help="cubins from compilers")
    options = parser.parse_args()
    if options.cache:
        create_folder(options.cache)
    for family, result in sorted(observe_files(options.files, options.cache).items()):
        floors = floor_rows(result.floors)
        exact, sufficient = attested_rows(result.sightings)
        table = {
            "architecture": f"sm_{family}",
            "source": options.source,
            "cubins": result.cubins,
            "instructions": result.instructions,
            "columns": ["least", "seen"],
            "ceilings": ceilings(floors, exact),
            "floors": floors,
            "attested": exact,
            "suffices": sufficient,
        }
        write_text_atomically(options.out / f"sm_{family}.json", _format_json(table) + "\n")
        print(f"sm_{family}: {result.cubins} cubins, {result.instructions} instructions")


if __name__ == "__main__":
    main()
