"""Random orders of the PTX of all corpus kernels: does ptxas accept them without new messages?

    python -m benchmarks run ptx.random_orders --every 3 --orders 4 \\
        --out benchmarks/ptx/results/random_orders.json

Triton kernels of the corpus are compiled for sm_80, sm_90 and sm_100; the committed PTX of
tests/corpus/ptx is taken as it is. For each kernel: the start state gives the text back byte for
byte, a random order parses to the same instructions in each block, the newest installed ptxas
assembles it, and it prints no message C7500 to C7599 (about asynchronous matrix instructions) that
the original lacks. The result file is written after each kernel. A second run computes only kernels
that are missing or whose PTX or code under test has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tests.corpus.ptx_catalogue import ptx_texts
from tests.corpus.triton_kernels import ENTRIES

from benchmarks.harness.result_file import save
from nostall.core.errors import NostallError
from nostall.ptx.assemble.builder import loss_codes, new_codes
from nostall.ptx.assemble.command import plain_command
from nostall.ptx.assemble.ptxas import run_ptxas
from nostall.ptx.assemble.versions import Assembler, find_assemblers
from nostall.ptx.program.module import Module, parse
from nostall.ptx.schedule.space import PtxSpace
from nostall.tuning.sources.triton_source import compile_triton

ROOT = Path(__file__).resolve().parents[2]
CAPABILITIES = (80, 90, 100)
SIGMAS = (2.0, 6.0, 20.0, 80.0)

Row = dict[str, Any]


def texts(every: int) -> Iterator[tuple[str, str | None]]:
    """Name and PTX of every N-th kernel file; None if Triton does not compile it."""
    yield from list(ptx_texts().items())[::every]
    pairs = [(e, c) for e in ENTRIES for c in e.capabilities if c in CAPABILITIES]
    for entry, capability in pairs[::every]:
        try:
            path = ROOT / entry.path
            arch = f"sm_{capability}"
            source = compile_triton(path, entry.launch, None, arch, options=entry.options)
            yield f"triton/{entry.name(capability)}", source.ptx
        except NostallError:
            yield f"triton/{entry.name(capability)}", None


def code_digest() -> str:
    """Digest of the code under test."""
    digest = hashlib.sha256()
    for part in ("text", "program", "schedule"):
        for path in sorted((ROOT / "src/nostall/ptx" / part).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def instructions(module: Module) -> list[Counter[str]]:
    """Per outer block, its instructions as multiset of texts."""
    return [
        Counter(" ".join(module.text[i.start : i.end].split()) for i in block.instructions)
        for function in module.functions
        for block in function.outer_blocks
    ]


def check_kernel(
    module: Module, kernel: str, orders: int, assembler: Assembler, folder: Path
) -> Row:
    """Random orders of one kernel; "passed" tells whether all checks held."""
    space = PtxSpace(module, kernel)
    arguments = plain_command(module.text).arguments()
    original = run_ptxas(assembler, module.text, arguments, folder)
    row: Row = {
        "kernel": kernel,
        "target": module.target,
        "instructions": sum(len(function.instructions) for function in space.functions),
        "blocks": len(space.blocks),
        "longest_block": max(map(len, space.blocks), default=0),
        "free_pairs": sum(graph.freedom for graph in space.graphs),
        "unknown_opcodes": dict(module.unknown_opcodes),
        "messages": dict(loss_codes(original.messages)),
        "orders": orders,
        "failures": [],
    }
    if space.text(space.start()) != module.text:
        row["failures"].append("the start state is not the text")
    if original.status != "assembled":
        row["failures"].append(f"the original: {original.detail}")
        return {**row, "passed": False}
    cubins = {original.cubin}
    rng = np.random.default_rng(zlib.crc32(kernel.encode()))
    began = time.perf_counter()
    for number in range(orders):
        state = space.reorder(space.start(), rng, SIGMAS[number % len(SIGMAS)])
        text = space.text(state)
        if instructions(parse(text)) != instructions(module):
            row["failures"].append(f"order {number} has other instructions in a block")
        found = run_ptxas(assembler, text, arguments, folder)
        cubins.add(found.cubin)
        new = new_codes(found.messages, original.messages)
        if found.status != "assembled" or new:
            row["failures"].append(f"order {number}: {dict(new)} {found.detail}")
    row["seconds_an_order"] = round((time.perf_counter() - began) / max(orders, 1), 3)
    row["distinct_cubins"] = len(cubins) - 1
    return {**row, "passed": not row["failures"]}


def check_text(text: str, orders: int, assembler: Assembler) -> list[Row]:
    """One row for each kernel of a module."""
    module = parse(text)
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        return [
            check_kernel(module, kernel.name, orders, assembler, Path(folder))
            for kernel in module.kernels
        ]


def summary(rows: dict[str, Row]) -> Row:
    """Totals over all kernels."""
    kernels = [kernel for row in rows.values() for kernel in row.get("kernels", ())]
    return {
        "files": len(rows),
        "not_compiled": sum("kernels" not in row for row in rows.values()),
        "kernels": len(kernels),
        "instructions": sum(kernel["instructions"] for kernel in kernels),
        "unknown_opcodes": dict(sum((Counter(k["unknown_opcodes"]) for k in kernels), Counter())),
        "orders": sum(kernel["orders"] for kernel in kernels),
        "distinct_cubins": sum(kernel.get("distinct_cubins", 0) for kernel in kernels),
        "passed": sum(kernel["passed"] for kernel in kernels),
        "failed": sum(not kernel["passed"] for kernel in kernels),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--orders", type=int, default=4, help="random orders of each kernel")
    parser.add_argument("--every", type=int, default=1, help="take every N-th kernel file")
    parser.add_argument("--match", default="", help="only files with this in their name")
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> int:
    """Check all kernels; returns 1 if a check failed."""
    assembler = max(find_assemblers(), key=lambda a: tuple(map(int, a.version.split("."))))
    code = code_digest()
    done: Row = json.loads(options.out.read_text()) if options.out.is_file() else {}
    rows: dict[str, Row] = done.get("files", {})
    for name, text in texts(options.every):
        if options.match not in name:
            continue
        key = {
            "sha256": None if text is None else hashlib.sha256(text.encode()).hexdigest(),
            "code": code,
            "asked": options.orders,
        }
        if {k: rows.get(name, {}).get(k) for k in key} == key:
            continue
        rows[name] = key
        if text is not None:
            rows[name] = {**key, "kernels": check_text(text, options.orders, assembler)}
        passed = all(kernel["passed"] for kernel in rows[name].get("kernels", ()))
        print(f"{name}: {'ok' if passed else f'FAILED {rows[name]}'}", flush=True)
        save(
            options.out,
            summary=summary(rows),
            ptxas=assembler.version,
            files=dict(sorted(rows.items())),
        )
    total = summary(rows)
    print(f"{total['passed']} of {total['kernels']} kernels passed, {total['orders']} orders")
    return 1 if total["failed"] else 0
