"""Kernels whose compiler reuses registers of warpgroup products that may still run.

    python -m benchmarks run sass.warpgroup_audit --out benchmarks/sass/results/warpgroup_audit.json

ptxas 12.9 may do that (Triton pull request 11781; fixed in CUDA 13.3). All cubins for sm_90 of the
corpus and of the examples are checked as the compiler wrote them; ``--files`` adds others.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tests.corpus import catalogue

from benchmarks.harness.result_file import save
from nostall.sass import Program
from nostall.sass.program.opcodes import Pipe
from nostall.sass.safety.hazards.validator import HazardValidator


def audit(path: Path) -> list[dict[str, Any]]:
    """A record for each function of a cubin that has warpgroup products."""
    program = Program.from_cubin(path.read_bytes())
    validator = HazardValidator(program.sm)
    records: list[dict[str, Any]] = []
    for function in program.functions:
        products = [i for i in function.instructions if i.pipe is Pipe.GMMA]
        if products:
            in_registers = [i for i in products if i.operands[1].startswith("R")]
            remarks = validator.remarks(function)
            records.append(
                {
                    "cubin": f"{path.parent.name}/{path.name}",
                    "function": function.name,
                    "products": len(products),
                    "with_operand_in_registers": len(in_registers),
                    "early_accesses": [str(remark) for remark in remarks],
                }
            )
    return records


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--files", type=Path, nargs="*", default=[], help="further cubins")


def main(options: argparse.Namespace) -> int:
    """Audit all cubins, print the functions with early accesses, write the file."""
    paths = [path for path in catalogue.corpus() if ".sm_90" in path.name]
    records = [record for path in [*paths, *options.files] for record in audit(path)]
    faulty = [record for record in records if record["early_accesses"]]
    for record in faulty:
        print(record["cubin"], record["function"], *record["early_accesses"], sep="\n    ")
    total = sum(record["products"] for record in records)
    in_registers = sum(record["with_operand_in_registers"] for record in records)
    print(
        f"{len(records)} functions with {total} products, {in_registers} of them with an operand "
        f"in registers: {len(faulty)} functions access registers too early"
    )
    save(
        options.out,
        cubins=len(paths) + len(options.files),
        functions=len(records),
        products=total,
        with_operand_in_registers=in_registers,
        functions_with_early_accesses=len(faulty),
        records=records,
    )
    return 0
