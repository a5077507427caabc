"""What order is free in the loops of kernels with wgmma, mma and neither, and what pins the rest?

    python -m benchmarks run ptx.freedom --cases FOLDER --out benchmarks/ptx/results/freedom.json

FOLDER holds the kernels that ``ptx.regression_times --prepare`` wrote; the PTX of the corpus that
changes its register counts (specialised warps) is added.  For each kernel the pairs of instructions
of its loop blocks are counted: ``free`` ones may be exchanged; ``registers`` ones would be free if
registers alone ordered instructions.  ``pins`` has, for each other resource, the pairs that become
free if it alone is left out.  No GPU is used: a free pair says nothing of time.
"""

from __future__ import annotations

import argparse
import pickle
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.corpus.ptx_catalogue import ptx_texts

from benchmarks.harness.result_file import save
from nostall.ptx.program.blocks import Block
from nostall.ptx.program.module import parse
from nostall.ptx.program.resources import MEMORY, Reference, Resource
from nostall.ptx.schedule.levers import NO_LEVERS
from nostall.ptx.schedule.space import PtxSpace, build_graph

Row = dict[str, Any]
PINS: dict[str, frozenset[Resource]] = {
    "asynchronous products": frozenset((Resource.WGMMA, Resource.TCGEN05)),
    "fences and barriers": frozenset((Resource.FENCE, Resource.CONVERGENCE, Resource.WARP)),
    "memory": MEMORY | {Resource.STABLE},
}
"""Resources that are left out together."""


def kernels(folder: Path) -> Iterator[tuple[str, str, str]]:
    """(name, PTX, kernel) of each kernel, each PTX once."""
    seen = set()
    for path in sorted(folder.glob("*.pickle")):
        name, builds = pickle.loads(path.read_bytes())
        if not isinstance(builds, str) and builds.source.ptx not in seen:
            seen.add(builds.source.ptx)
            yield name, builds.source.ptx, builds.source.kernel
    for name, text in ptx_texts().items():
        for kernel in parse(text).kernels if "setmaxnreg" in text else ():
            if any(i.base == "setmaxnreg" for i in kernel.instructions):
                yield f"{name}:{kernel.name}", text, kernel.name


def kind(ptx: str, opcodes: Sequence[str]) -> str:
    """What multiplies matrices in a kernel."""
    if "setmaxnreg" in ptx:
        return "wgmma, specialised warps"
    bases = {opcode.partition(".")[0] for opcode in opcodes}
    return next((base for base in ("wgmma", "mma") if base in bases), "neither")


def free_pairs(block: Block, keep: Callable[[Reference], bool]) -> int:
    """Pairs of units whose order is free if only the kept resources order them."""
    units = tuple(
        replace(u, reads=frozenset(filter(keep, u.reads)), writes=frozenset(filter(keep, u.writes)))
        for u in block.units
    )
    return build_graph(replace(block, units=units)).freedom


def count(ptx: str, kernel: str) -> Row | None:
    """The pairs of a kernel's loop blocks; None without a loop."""
    space = PtxSpace(parse(ptx), kernel, NO_LEVERS)
    blocks = [b for b in space.blocks if b.depth > 0 and len(b) > 1]
    if not blocks:
        return None
    found: Counter[str] = Counter()
    for block in blocks:
        found["pairs"] += len(block) * (len(block) - 1) // 2
        found["free"] += (free := build_graph(block).freedom)
        found["registers"] += free_pairs(block, lambda r: isinstance(r, str))
        for name, left_out in PINS.items():
            found[name] += free_pairs(block, lambda r, out=left_out: r not in out) - free
    opcodes = [i.opcode for i in space.kernel.instructions]
    return {"kind": kind(ptx, opcodes), "instructions": sum(map(len, blocks)), **found}


def summary(rows: Sequence[Row]) -> dict[str, Row]:
    """Shares of the pairs by kind of kernel: the mean over kernels."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["kind"]].append(row)
    return {
        name: {
            "kernels": len(group),
            **{
                part: round(sum(row[part] / row["pairs"] for row in group) / len(group), 4)
                for part in ("free", "registers", *PINS)
            },
        }
        for name, group in sorted(groups.items())
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=Path, required=True, help="made by regression_times")
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> int:
    """Count the pairs of all kernels."""
    rows = []
    for name, ptx, kernel in kernels(options.cases):
        if (found := count(ptx, kernel)) is not None:
            rows.append({"kernel": name, **found})
            print(name, found, flush=True)
    save(options.out, kind="counted", pins=list(PINS), summary=summary(rows), rows=rows)
    for title, group in summary(rows).items():
        print(title, group)
    return 0
