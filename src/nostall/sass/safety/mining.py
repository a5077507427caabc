"""Mine latency floors from compiler output.

    python -m nostall.sass.safety.mining --out src/nostall/sass/safety/floors FILE.cubin ...

For every fixed-latency producer and everything that touches its registers while they could still
be in flight, the least issue distance over all paths is recorded.  Compilers keep distances that
the hardware needs, so the least distance seen over enough code is a safe floor for others.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from nostall.core.errors import BadBinary
from nostall.sass.program import Function, Instruction, Program
from nostall.sass.program.opcodes import Pipe, lookup
from nostall.sass.safety import facts as fact
from nostall.sass.safety import latency, pending
from nostall.sass.safety.latency import FAMILY, Kind

HORIZON = 48
"""Cycles up to which distances are recorded; longer ones say nothing about latency."""

NEAR = 8
"""Cycles above the least distance within which the usual one is looked for."""

Distances = Counter[tuple[Kind, str, int]]


@dataclass(slots=True)
class Harvest:
    """Distances seen on one architecture family, and the files they came from."""

    distances: Distances = field(default_factory=Counter)
    files: list[str] = field(default_factory=list)
    instructions: int = 0


def harvest(data: bytes) -> tuple[int, Distances, int]:
    """(architecture, distances, number of instructions) of one cubin."""
    program = Program.from_cubin(data)
    found: Distances = Counter()
    for function in program.functions:
        _observe(function, program.sm, found)
    return program.sm, found, sum(len(f.instructions) for f in program.functions)


def _observe(function: Function, sm: int, found: Distances) -> None:
    order = function.instructions
    facts = {i.index: fact.facts_of(i, sm, HORIZON) for i in order}
    entries = pending.entry_states(function.blocks, order, facts)
    for block, state in zip(function.blocks, entries, strict=True):
        for first, second in pairwise(order[block.start : block.end]):
            found["ISSUE", latency.adjacency(first, second), first.control.stall] += 1
        _near_walls(order[block.start : block.end], found)
        for here, in_flight, _ in pending.walk(state, block, order, facts):
            for hit in pending.conflicts(here, in_flight, facts):
                if hit.first.fixed:
                    _count(hit, found)


def _near_walls(order: Sequence[Instruction], found: Distances) -> None:
    """Distances of instructions to the walls around them."""
    now = 0
    recent: list[tuple[int, Instruction]] = []
    for instruction in order:
        recent = [(at, i) for at, i in recent if now - at < latency.WALL_REACH]
        for at, earlier in recent:
            if earlier.is_wall:
                found["AFTER", latency.wall_pair(earlier, instruction), now - at] += 1
            if instruction.is_wall:
                found["BEFORE", latency.wall_pair(instruction, earlier), now - at] += 1
        recent.append((now, instruction))
        now += instruction.control.stall


def _count(hit: pending.Conflict, found: Distances) -> None:
    first, second = hit.first.instruction, hit.second.instruction
    names: set[str] = set()
    for register in fact.registers_in(hit.mask):
        names.update(latency.pairs(first, second, register, hit.kind))
    for name in names:
        found[hit.kind, name, hit.item.elapsed] += 1


def summarise(distances: Distances) -> dict[str, dict[str, list[int]]]:
    """{kind: {pair: [least, usual, seen]}}; usual is the most frequent distance near the least
    (longer distances are other work in between, not latency)."""
    grouped: dict[tuple[Kind, str], Counter[int]] = defaultdict(Counter)
    for (kind, name, distance), count in distances.items():
        grouped[kind, name][distance] += count
    out: dict[str, dict[str, list[int]]] = {}
    for (kind, name), counts in sorted(grouped.items()):
        near = [d for d in counts if d <= min(counts) + NEAR]
        usual = max(near, key=lambda d: (counts[d], -d))
        out.setdefault(kind, {})[name] = [min(counts), usual, counts.total()]
    return out


def mine(paths: Iterable[Path], workers: int = 2) -> dict[int, Harvest]:
    """Harvest many cubins; unreadable ones (other architectures) are left out."""
    families: dict[int, Harvest] = defaultdict(Harvest)
    paths = list(paths)
    with ProcessPoolExecutor(workers) as pool:
        for path, result in zip(paths, pool.map(_one, paths, chunksize=4), strict=True):
            if result is None:
                continue
            sm, distances, count = result
            family = families[FAMILY[sm]]
            family.distances.update(distances)
            family.files.append(path.name)
            family.instructions += count
    _share(families)
    return families


def _share(families: dict[int, Harvest]) -> None:
    """sm_80 and sm_86/89 have the same pipes but for the matrix and FP64 units: what was seen on
    one holds for the other."""
    pair = [families[f] for f in (80, 86) if f in families]
    common: Distances = Counter()
    for family in pair:
        common.update({key: n for key, n in family.distances.items() if not _own_unit(key[1])})
    for family in pair:
        own = {key: n for key, n in family.distances.items() if _own_unit(key[1])}
        family.distances = Counter(own) + common


def _own_unit(name: str) -> bool:
    """Whether a table row is about a producer in a unit that differs within the generation."""
    base = name.partition("|")[0].partition(">")[0].partition(".")[0]
    row = lookup(base)
    return base in ("mma", "double") or (row is not None and row.pipe in (Pipe.MMA, Pipe.DOUBLE))


def _one(path: Path) -> tuple[int, Distances, int] | None:
    try:
        return harvest(path.read_bytes())
    except BadBinary:
        return None


def main() -> None:
    """Write one table per architecture family."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--source", default="", help="what the files are, for the provenance")
    parser.add_argument("--merge", action="store_true", help="fold into the tables in --out")
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args()
    for family, result in sorted(mine(options.files).items()):
        target = options.out / f"sm_{family}.json"
        table = {
            "architecture": f"sm_{family}",
            "sources": [options.source],
            "cubins": len(result.files),
            "instructions": result.instructions,
            "columns": ["least", "usual", "seen"],
            "floors": summarise(result.distances),
        }
        if options.merge and target.exists():
            table = merged(json.loads(target.read_text()), table)
        text = json.dumps(table, indent=0).replace(",\n", ", ").replace("], ", "],\n")
        target.write_text(text + "\n")
        print(f"sm_{family}: {len(result.files)} cubins, {result.instructions} instructions")


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Both tables in one: the lesser least distance, the usual one of the better-observed, and the
    larger count (the same cubin may be behind both)."""
    floors = {kind: dict(rows) for kind, rows in old["floors"].items()}
    for kind, rows in new["floors"].items():
        into = floors.setdefault(kind, {})
        for name, row in rows.items():
            mine = into.get(name, row)
            usual = max(mine, row, key=lambda r: r[2])[1]
            into[name] = [min(mine[0], row[0]), usual, max(mine[2], row[2])]
    return {
        **new,
        "sources": [*old.get("sources", []), *new["sources"]],
        "cubins": max(old["cubins"], new["cubins"]),
        "instructions": max(old["instructions"], new["instructions"]),
        "floors": {kind: dict(sorted(rows.items())) for kind, rows in sorted(floors.items())},
    }


if __name__ == "__main__":
    main()
