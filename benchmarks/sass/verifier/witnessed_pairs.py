"""Which pairs of instruction groups does compiler output need to be in order, and how often?

    python -m benchmarks run sass.witnessed_pairs --folder FOLDER \\
        --out src/nostall/sass/program/witnessed_pairs.json

Each function is analysed as if no pair had witnesses.  An access that only an order protects then
names the later instructions that may prove it.  If all of them make one pair with the earlier
instruction, the function is a witness of this pair; if all of them have a guard, it is a *guarded*
witness, too.  The verifier lets a candidate rely on the order of a pair with at least three
witnesses (``nostall.sass.program.cover_rules``).  ``--guarded`` counts guarded witnesses only, in
other cubins than those of the file.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tests.corpus import catalogue

from benchmarks.harness.result_file import head, load, save
from benchmarks.sass.verifier.cover_rules import corpus_paths
from nostall.core.errors import BadBinary
from nostall.sass import Program
from nostall.sass.program import Function
from nostall.sass.program.cover_rules import (
    LEAST_WITNESSES,
    RULES,
    Claim,
    CoverTable,
    OrderedPair,
    group,
    ordered_pairs,
)
from nostall.sass.safety.hazards.validator import HazardValidator
from nostall.sass.safety.pairing import HazardKind

MAX_INSTRUCTIONS = 1500
"""Larger functions are left out: without witnesses, much is in flight at a time."""
PROGRESS = 100
"""Cubins after which the table so far is written."""

_PAIRS = ordered_pairs()
_NO_WITNESSES = CoverTable(RULES, frozenset(), frozenset())

Witness = tuple[OrderedPair, int, str, bool]
"""(pair, architecture, function that needs it, whether only guarded instructions prove it)."""


def needed_pairs(function: Function, sm: int) -> dict[OrderedPair, bool]:
    """The pairs without whose order a result or a source of the function is not protected.

    The value is whether only guarded instructions protect one of them.
    """
    analysis = HazardValidator(sm, _NO_WITNESSES).analyse(function)
    groups = {i.index: group(i, sm) for i in function.instructions}
    guarded = {i.index for i in function.instructions if i.is_guarded}
    needed: dict[OrderedPair, bool] = {}
    for (first, _, kind), provers in analysis.reliances.items():
        pairs = {_pair(kind, groups[first], groups[later]) for later in provers}
        if len(pairs) == 1:
            (pair,) = pairs
            needed[pair] = needed.get(pair, False) or provers <= guarded
    return needed


def _pair(kind: HazardKind, earlier: str, later: str) -> OrderedPair:
    """The order that protects an access; a written result also proves that sources are read."""
    if later == "BAR":
        return OrderedPair(Claim.DRAINS_SOURCES, earlier, later)
    sources = OrderedPair(Claim.SOURCES, earlier, later)
    if kind == "WAR" and sources in _PAIRS:
        return sources
    return OrderedPair(Claim.RESULT, earlier, later)


def examine(path: Path) -> tuple[list[Witness], int]:
    """(witnesses, number of functions) of one cubin."""
    try:
        program = Program.from_cubin(path.read_bytes())
    except BadBinary:
        return [], 0
    name = str(path.relative_to(catalogue.ROOT)) if catalogue.ROOT in path.parents else path.name
    small = [f for f in program.functions if len(f.instructions) <= MAX_INSTRUCTIONS]
    return [
        (pair, program.sm, f"{name}:{function.name}", guarded)
        for function in small
        for pair, guarded in needed_pairs(function, program.sm).items()
    ], len(small)


def records(witnesses: list[Witness]) -> Iterator[dict[str, Any]]:
    """One row for each pair that has a witness."""
    found: dict[OrderedPair, list[Witness]] = defaultdict(list)
    for witness in witnesses:
        found[witness[0]].append(witness)
    for pair, own in sorted(found.items()):
        yield {
            "order": pair.order.value,
            "earlier": pair.earlier,
            "later": pair.later,
            "functions": len(own),
            "guarded": sum(guarded for *_, guarded in own),
            "architectures": dict(sorted(Counter(f"sm_{sm}" for _, sm, *_ in own).items())),
            "witnesses": sorted((name for _, _, name, _ in own), key=len)[:LEAST_WITNESSES],
        }


def with_guarded(rows: list[dict[str, Any]], more: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a file with the guarded witnesses that another run counted."""
    counts = {(row["order"], row["earlier"], row["later"]): row["guarded"] for row in more}
    return [
        {**row, "guarded": counts.get((row["order"], row["earlier"], row["later"]), 0)}
        for row in rows
    ]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--every", type=int, default=1, help="every N-th Triton cubin; 0: no corpus"
    )
    parser.add_argument("--folder", type=Path, help="a folder with further cubins")
    parser.add_argument(
        "--guarded", action="store_true", help="replace only the guarded witnesses in the file"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--nice", type=int, default=5)


def main(options: argparse.Namespace) -> None:
    """Count the witnesses, print a table, write the file."""
    further = sorted(options.folder.glob("*.cubin")) if options.folder else []
    paths = [*corpus_paths(options.every), *further]
    witnesses: list[Witness] = []
    functions = 0
    os.nice(options.nice)
    with ProcessPoolExecutor(options.jobs) as pool:
        for at, (found, count) in enumerate(pool.map(examine, paths, chunksize=4), 1):
            witnesses += found
            functions += count
            if at % PROGRESS == 0 and not options.guarded:
                save(options.out, cubins=at, functions=functions, pairs=list(records(witnesses)))
    pairs = list(records(witnesses))
    body: dict[str, Any] = {"cubins": len(paths), "functions": functions, "pairs": pairs}
    if options.guarded:
        run = {**head(), "cubins": len(paths), "functions": functions}
        earlier = load(options.out)
        body = {**earlier, "guarded_run": run, "pairs": with_guarded(earlier["pairs"], pairs)}
    for row in pairs:
        print(
            f"{row['order']:18} {row['earlier']:20} {row['later']:20} {row['functions']:5}"
            f" {row['guarded']:5}"
        )
    enough = sum(row["functions"] >= LEAST_WITNESSES for row in pairs)
    print(
        f"{functions} functions; {enough} of {len(_PAIRS)} pairs have {LEAST_WITNESSES} witnesses"
    )
    save(options.out, **body)
