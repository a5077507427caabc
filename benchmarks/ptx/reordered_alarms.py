"""Does the verifier of machine code accept what ptxas makes of re-ordered PTX?

    python -m benchmarks run ptx.reordered_alarms --every 4 --orders 3 \\
        --out benchmarks/ptx/results/reordered_alarms.json

An order of PTX that nobody compiled before gives machine code that no table of the verifier was
made from. The PTX is that of the corpus (see ``ptx.random_orders``), and of the kernels of
``benchmarks.kernels.unseen``, compiled by Triton for sm_90. Each order is assembled by one of the
versions of ptxas that accept the original, in turn, and validated by itself. A refusal is a false
alarm, unless ptxas is wrong. A second run goes on.

``--files`` takes other PTX. The proof must accept each order of it, too. cutlass_alarms.json is of
examples of https://github.com/NVIDIA/cutlass at commit 7107b05535f8 (``exN`` is example N; of 77,
the file 77_blackwell_mla.cu with -DFP16; of 55, the file 55_hopper_int4_bf16_gemm.cu), each
compiled by nvcc 13.0 in the repository's folder, with -arch=sm_90a, sm_100a or sm_120a:

    nvcc -std=c++17 -O3 -DNDEBUG --expt-relaxed-constexpr -arch=ARCH -Iinclude \\
        -Itools/util/include -Iexamples/common -ptx -o exN.ptx examples/N_.../N_....cu
    python -m benchmarks run ptx.reordered_alarms --orders 2 --files ex*.ptx \\
        --out benchmarks/ptx/results/cutlass_alarms.json
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.result_file import save
from benchmarks.kernels.unseen import unseen_entries
from benchmarks.ptx.random_orders import SIGMAS, texts
from benchmarks.sass.compiler_baseline import try_build
from nostall.core.errors import BadBinary, NostallError
from nostall.ptx.assemble.command import plain_command
from nostall.ptx.assemble.ptxas import run_ptxas
from nostall.ptx.assemble.versions import find_assemblers
from nostall.ptx.program.module import parse
from nostall.ptx.safety.validate import Validator
from nostall.ptx.schedule.space import PtxSpace
from nostall.sass import validate

Row = dict[str, Any]


def unseen_texts() -> Iterator[tuple[str, str | None]]:
    """Name and PTX of each configuration of the kernels of ``unseen``."""
    for entry in unseen_entries():
        for number, options in enumerate(entry.options or [None]):
            built = try_build(entry, options)
            yield f"unseen/{entry.name}.{number}", None if isinstance(built, str) else built.ptx


def judge(named: tuple[str, str], orders: int) -> tuple[str, Row]:
    """Validate the original and random orders of one PTX file."""
    name, text = named
    row: Row = {"validated": 0, "instructions": 0, "refused": [], "not_assembled": 0}
    proof = Validator(text)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    arguments = plain_command(text).arguments()
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        assemblers = [
            assembler
            for assembler in find_assemblers()
            if run_ptxas(assembler, text, arguments, Path(folder)).status == "assembled"
        ]
        for number in range(orders + 1 if assemblers else 0):
            assembler = assemblers[number % len(assemblers)]
            ordered = text
            for kernel in parse(text).kernels if number else ():
                space = PtxSpace(parse(ordered), kernel.name)
                sigma = SIGMAS[number % len(SIGMAS)]
                ordered = space.text(space.reorder(space.start(), rng, sigma))
            if findings := proof.check(ordered).findings:
                row["refused"].append({"order": number, "why": f"proof: {findings[0]}"[:300]})
                continue
            found = run_ptxas(assembler, ordered, arguments, Path(folder))
            if found.status != "assembled":
                row["not_assembled"] += 1
                continue
            try:
                verdict = validate(found.cubin)
            except BadBinary as error:
                row["refused"].append({"order": number, "why": str(error)[:300]})
                continue
            row["validated"] += 1
            row["instructions"] += verdict.checked
            if verdict.findings:
                first = verdict.findings[0]
                why = f"{first.kind} {first.offset:#x}: {first.instruction}: {first.reason}"[:300]
                row["refused"].append({"order": number, "ptxas": assembler.version, "why": why})
    return name, row


def summary(rows: dict[str, Row]) -> Row:
    """Totals over all files."""
    kinds: Counter[str] = Counter()
    for row in rows.values():
        kinds.update(refusal["why"].split(" ")[0] for refusal in row["refused"])
    return {
        "files": len(rows),
        "cubins_validated": sum(row["validated"] for row in rows.values()),
        "instructions": sum(row["instructions"] for row in rows.values()),
        "refused": sum(len(row["refused"]) for row in rows.values()),
        "first_findings": dict(kinds),
        "not_assembled": sum(row["not_assembled"] for row in rows.values()),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--orders", type=int, default=3, help="random orders of each kernel")
    parser.add_argument("--every", type=int, default=1, help="every N-th file of the corpus")
    parser.add_argument("--match", default="", help="only files with this in their name")
    parser.add_argument("--files", type=Path, nargs="*", default=[], help="PTX files instead")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> int:
    """Judge all files; returns 1 if one was refused."""
    rows: dict[str, Row] = {}
    if options.out.is_file():
        rows = json.loads(options.out.read_text())["rows"]
    everything: Iterable[tuple[str, str | None]] = (
        ((path.stem, path.read_text()) for path in options.files)
        if options.files
        else (*unseen_texts(), *texts(options.every))
    )
    wanted = [
        (name, text)
        for name, text in everything
        if text is not None and name not in rows and options.match in name
    ]
    with ProcessPoolExecutor(options.jobs) as pool:
        for name, row in pool.map(partial(_judge, options.orders), wanted):
            rows[name] = row
            if row["refused"]:
                print(f"{name}: {row['refused'][0]}", flush=True)
            save(
                options.out,
                summary=summary(rows),
                ptxas=[assembler.version for assembler in find_assemblers()],
                rows=dict(sorted(rows.items())),
            )
    total = summary(rows)
    print(f"{total['refused']} of {total['cubins_validated']} cubins refused")
    return 1 if total["refused"] else 0


def _judge(orders: int, named: tuple[str, str]) -> tuple[str, Row]:
    os.nice(5)
    try:
        return judge(named, orders)
    except NostallError as error:  # a kernel that the PTX reader refuses must not end the run
        return named[0], {"validated": 0, "instructions": 0, "refused": [],
                          "not_assembled": 1, "error": str(error)[:300]}  # fmt: skip
