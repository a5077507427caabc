"""Mine latencies from compiler output.

    python -m nostall.sass.safety.mining --out src/nostall/sass/safety/floors FILE.cubin ...

For every fixed-latency producer and everything that touches its registers while they could still
be in flight, the least issue distance over all paths is recorded per class of pair (*floors*), and
in straight-line code per exact pair (*attested*, see :mod:`.evidence`).  Compilers keep distances
that the hardware needs, so the least distance seen over enough code is safe for others.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pickle
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

from nostall.core.errors import BadBinary
from nostall.sass.program import Function, Program
from nostall.sass.program.opcodes import Pipe, lookup
from nostall.sass.safety import evidence, pairing
from nostall.sass.safety import facts as fact
from nostall.sass.safety import in_flight as pending
from nostall.sass.safety.latency import FAMILY

HORIZON = 48
"""Cycles up to which distances are recorded; longer ones say nothing about latency."""

BELIEVED = 3
"""Sightings at or below a distance from which it counts as attested."""

REPEATED = 60
"""Sightings from which an exact pair speaks for its class."""

SEVERAL = 10
"""Sightings from which an exact pair speaks for its producer."""

COMMON = 100
"""Sightings from which a read tells how long a producer's class takes at most."""

Distances = Counter[tuple[str, str, int]]
"""(kind, coarse name, cycles) -> how often."""

Rows = dict[str, dict[str, list[int]]]
"""kind -> name of the pair -> [least distance, sightings]."""


@dataclass(slots=True)
class Harvest:
    """What was seen on one architecture family."""

    floors: Distances = field(default_factory=Counter)
    sightings: evidence.Sightings = field(default_factory=Counter)
    cubins: int = 0
    instructions: int = 0

    def add(self, other: Harvest) -> None:
        self.floors.update(other.floors)
        self.sightings.update(other.sightings)
        self.cubins += other.cubins
        self.instructions += other.instructions


def harvest(data: bytes) -> tuple[int, Harvest]:
    """(architecture, what one cubin shows)."""
    program = Program.from_cubin(data)
    found = Harvest(cubins=1, instructions=sum(len(f.instructions) for f in program.functions))
    for function in program.functions:
        _observe(function, program.sm, found)
    return program.sm, found


def _observe(function: Function, sm: int, found: Harvest) -> None:
    order = function.instructions
    facts = {i.index: fact.facts_of(i, sm, HORIZON) for i in order}
    entries = pending.entry_states(function.blocks, order, facts)
    for block, state in zip(function.blocks, entries, strict=True):
        span = order[block.start : block.end]
        evidence.sight(span, sm, found.sightings)
        for first, second in pairwise(span):
            found.floors["ISSUE", pairing.neighbours(first, second), first.control.stall] += 1
        for here, in_flight, _ in pending.walk(state, block, order, facts):
            for hit in pending.conflicts(here, in_flight, facts):
                if hit.first.fixed:
                    _count(hit, found.floors)


def _count(hit: pending.Conflict, found: Distances) -> None:
    first, second = hit.first.instruction, hit.second.instruction
    names: set[str] = set()
    for register in fact.registers_in(hit.mask):
        names.update(pairing.coarse(first, second, register, hit.kind))
    for name in names:
        found[hit.kind, name, hit.item.elapsed] += 1


def floors_of(distances: Distances) -> Rows:
    """Per class of pair the least distance, and how often the class was seen."""
    grouped: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    for (kind, name, distance), count in distances.items():
        grouped[kind, name][distance] += count
    out: Rows = {}
    for (kind, name), counts in sorted(grouped.items()):
        out.setdefault(kind, {})[name] = [min(counts), counts.total()]
    return out


def attested_of(sightings: evidence.Sightings) -> tuple[Rows, Rows]:
    """(per exact pair the least attested distance; per class, and per producer, the largest)."""
    grouped: dict[tuple[str, str, str], Counter[int]] = defaultdict(Counter)
    for (kind, name, wide, distance), count in sightings.items():
        grouped[kind, name, wide][distance] += count
    exact: Rows = {}
    suffices: Rows = {}
    for (kind, name, wide), counts in sorted(grouped.items()):
        least = _believed(counts)
        if least is None:
            continue
        known = exact.setdefault(kind, {}).get(name)
        pair = least if known is None else min(least, known[0])
        exact[kind][name] = [pair, counts.total() + (known[1] if known else 0)]
        producer = name.partition("|")[0]
        for group, needed in ((wide, REPEATED), (producer, SEVERAL)):
            if counts.total() >= needed:
                row = suffices.setdefault(kind, {}).setdefault(group, [0, 0])
                row[:] = [max(row[0], least), row[1] + counts.total()]
    return exact, suffices


def ceilings_of(floors: Rows, exact: Rows) -> dict[str, int]:
    """Per class of producer the largest distance that any common read of it needs."""
    found: dict[str, int] = {}
    for rows in (floors, exact):
        for name, (least, seen) in rows.get("RAW", {}).items():
            if seen >= COMMON and (group := _class_of(name)):
                found[group] = max(least, found.get(group, 0))
    return dict(sorted(found.items()))


def _class_of(name: str) -> str:
    """The producer's class of a row, as :func:`.pairing.group` gives it."""
    opcode, _, register = name.partition("|")[0].partition(">")
    row = lookup(opcode.partition(".")[0])
    file = register.partition("@")[0].rstrip("0123456789")
    return f"{row.pipe if row else opcode}>{file}"


def _believed(counts: Counter[int]) -> int | None:
    """The least distance at or below which a pair was seen often enough."""
    seen = 0
    for distance in sorted(counts):
        seen += counts[distance]
        if seen >= BELIEVED:
            return distance
    return None


def mine(paths: Iterable[Path], cache: Path | None, workers: int = 2) -> dict[int, Harvest]:
    """Harvest many cubins; unreadable ones (other architectures) are left out."""
    families: dict[int, Harvest] = defaultdict(Harvest)
    with ProcessPoolExecutor(workers) as pool:
        for result in pool.map(partial(_one, cache=cache), list(paths), chunksize=2):
            if result is not None:
                families[FAMILY[result[0]]].add(result[1])
    _share(families)
    return families


def _share(families: dict[int, Harvest]) -> None:
    """sm_80 and sm_86/89 have the same pipes but for the matrix and FP64 units: what was seen on
    one holds for the other."""
    pair = [families[f] for f in (80, 86) if f in families]
    floors: Distances = Counter()
    sightings: evidence.Sightings = Counter()
    for family in pair:
        floors.update({key: n for key, n in family.floors.items() if not _own_unit(key[1])})
        sightings.update({key: n for key, n in family.sightings.items() if not _own_unit(key[1])})
    for family in pair:
        own = {key: n for key, n in family.floors.items() if _own_unit(key[1])}
        family.floors = Counter(own) + floors
        seen = {key: n for key, n in family.sightings.items() if _own_unit(key[1])}
        family.sightings = Counter(seen) + sightings


def _own_unit(name: str) -> bool:
    """Whether a row is about a producer in a unit that differs within the generation."""
    base = name.partition("|")[0].partition(">")[0].partition(".")[0]
    row = lookup(base)
    return base in ("mma", "double") or (row is not None and row.pipe in (Pipe.MMA, Pipe.DOUBLE))


def _one(path: Path, cache: Path | None) -> tuple[int, Harvest] | None:
    data = path.read_bytes()
    kept = cache / hashlib.blake2b(data, digest_size=12).hexdigest() if cache else None
    if kept is not None and kept.exists():
        return pickle.loads(kept.read_bytes())  # type: ignore[no-any-return]
    try:
        found = harvest(data)
    except BadBinary:
        return None
    if kept is not None:
        kept.write_bytes(pickle.dumps(found))
    return found


def _text(value: object, indent: str = "") -> str:
    """JSON with one row to a line."""
    if not isinstance(value, dict):
        return json.dumps(value)
    inner = indent + " "
    rows = (f"{inner}{json.dumps(key)}: {_text(item, inner)}" for key, item in value.items())
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"


def main() -> None:
    """Write one table per architecture family."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--source", default="", help="what the files are, for the provenance")
    parser.add_argument("--cache", type=Path, help="a folder that keeps each file's harvest")
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args()
    if options.cache:
        options.cache.mkdir(parents=True, exist_ok=True)
    for family, result in sorted(mine(options.files, options.cache).items()):
        floors = floors_of(result.floors)
        exact, suffices = attested_of(result.sightings)
        table = {
            "architecture": f"sm_{family}",
            "source": options.source,
            "cubins": result.cubins,
            "instructions": result.instructions,
            "columns": ["least", "seen"],
            "ceilings": ceilings_of(floors, exact),
            "floors": floors,
            "attested": exact,
            "suffices": suffices,
        }
        (options.out / f"sm_{family}.json").write_text(_text(table) + "\n")
        print(f"sm_{family}: {result.cubins} cubins, {result.instructions} instructions")


if __name__ == "__main__":
    main()
