"""Kernels rebuilt from public reports of slower compilers: what `nostall regress` says of each.

    python -m benchmarks run ptx.reported_regressions --ptxas FOLDER \\
        --older-triton .cache/triton-3.6.0 --out benchmarks/ptx/results/reported_regressions.json

FOLDER holds ``VERSION/bin/ptxas``, as for ``ptx.regressions``.  The kernels are written from the
text of the reports, not copied (``attention.py``).  ``versions`` has what each ptxas
reports of the kernel's PTX, ``case`` the comparison and the search of its input.  What was fast
depends on the report: an older ptxas, the kernel as an older Triton compiles it, or the same PTX
with another kernel name.  No GPU is used, so whether a loss costs time is not known; with ``--gpu``
each case is also timed and searched on the GPU (``measured``).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness.result_file import head, load, save
from benchmarks.harness.schema import Instructions, Options
from benchmarks.kernels.suite import Entry, build
from benchmarks.ptx.compilers.regressions import assemble, searched
from nostall.core.errors import NostallError
from nostall.gpu import Kernel, LocalGpu
from nostall.ptx.assemble.versions import Assembler, version_numbers
from nostall.tuning.regress.job import Case, newer_binary, older_by_cubin, older_by_ptxas
from nostall.tuning.regress.measured import measure
from nostall.tuning.settings import Settings
from nostall.tuning.sources.ptx_source import load_ptx
from nostall.tuning.sources.source import Source

KERNELS = Path(__file__).resolve().with_name("attention.py")
_OLDER_TRITON = """
import sys
from benchmarks.ptx.compilers.reported import REPORTS
sys.stdout.buffer.write(REPORTS[sys.argv[1]].source().cubin)
"""
Row = dict[str, Any]


@dataclass(frozen=True)
class Reported:
    """A kernel of a report, and what was fast."""

    report: str
    kernel: str
    problem: tuple[int, ...]
    options: Options
    older: Literal["ptxas", "triton", "name"]
    instructions: Instructions | None = None
    """``mma``: without Hopper's ``wgmma``."""

    def source(self) -> Source:
        """The kernel as the installed Triton compiles it for sm_90."""
        return build(
            Entry(self.kernel, KERNELS, self.problem, instructions=self.instructions), self.options
        )


def _options(tile: tuple[int, ...], warps: int, stages: int) -> Options:
    return Options(tile=tile, num_warps=warps, num_stages=stages, maxnreg=None)


_CONCH = "https://github.com/stackav-oss/conch/issues/20"
_TRITON = "https://github.com/triton-lang/triton/issues/11373"
_CUTLASS = "https://github.com/NVIDIA/cutlass/issues/3389"
_PAGED = (8, 512, 32, 128, 32)
REPORTS: dict[str, Reported] = {
    "paged attention, decode": Reported(
        _CONCH, "varlen_attention", (8, 16, 32, 128, 32), _options((16,), 4, 2), "ptxas"
    ),
    "sparse decode, 8 warps": Reported(
        _TRITON, "sparse_decode", (24, 64, 4224, 512), _options((64, 32), 8, 1), "triton"
    ),
    "sparse decode, 4 warps": Reported(
        _TRITON, "sparse_decode", (24, 64, 4224, 512), _options((64, 16), 4, 1), "triton"
    ),
    "kernel name with cutlass": Reported(
        _CUTLASS, "varlen_attention", _PAGED, _options((64,), 4, 2), "name", "mma"
    ),
    "kernel name with cutlass, 128 rows": Reported(
        _CUTLASS, "varlen_attention", _PAGED, _options((128,), 4, 3), "name", "mma"
    ),
}


def make_case(
    name: str, oldest: Assembler, newest: Assembler, older_triton: Path | None
) -> Case | str:
    """The comparison of a report; a text says what is missing."""
    reported = REPORTS[name]
    source = reported.source()
    if reported.older == "ptxas":
        command, newer = newer_binary(source, newest)
        return Case(source, command, older_by_ptxas(source, command, oldest, newer), newer)
    if reported.older == "triton":
        if older_triton is None:
            return "--older-triton is not given"
        command, newer = newer_binary(source, None)
        arguments = [sys.executable, "-c", _OLDER_TRITON, name]
        path = os.pathsep.join([str(older_triton.absolute()), str(Path.cwd())])
        run = subprocess.run(
            arguments, capture_output=True, env={**os.environ, "PYTHONPATH": path}, check=False
        )
        if run.returncode != 0:
            return f"the older Triton fails: {run.stderr.decode()[-200:]}"
        older = older_by_cubin(source, run.stdout, older_triton.name)
        return Case(source, command, older, newer)
    plain = _renamed(source, f"another_{reported.kernel}", newest)
    source = _renamed(source, f"cutlass_{reported.kernel}", newest)
    command, newer = newer_binary(source, newest)
    return Case(source, command, older_by_cubin(source, plain.cubin, "the same PTX"), newer)


def _renamed(source: Source, name: str, assembler: Assembler) -> Source:
    """The PTX of a source with another kernel name, assembled as a ``.ptx`` file."""
    assert source.ptx is not None
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(re.sub(rf"\b{source.kernel}\b", name, source.ptx))
        loaded = load_ptx(path, name, source.launch, "sm_90a", "-lineinfo", [assembler])
    return replace(loaded, origin="kernel.ptx", provenance=dict(loaded.provenance))


def measured(case: Case, seconds: float) -> Row:
    """The times of both binaries, and the search for what was lost."""
    settings = Settings("assembler", seconds=seconds, objective="gpu")
    assert case.source.launch is not None
    kernel = Kernel(case.newer.cubin, case.source.kernel, case.source.launch)
    with LocalGpu(kernel, settings.measurement_plan) as gpu:
        return {**measure(case, settings, gpu).to_json(), "gpu": dict(gpu.info)}


def run_report(name: str, found: Sequence[Assembler], options: argparse.Namespace, row: Row) -> Row:
    """The row of a report; what ``row`` has stays."""
    row = {"report": REPORTS[name].report, "older": REPORTS[name].older, **row}
    case = make_case(name, found[0], found[-1], options.older_triton)
    if isinstance(case, str):
        return {**row, "failure": case}
    if "versions" not in row:
        reports = assemble(case.source, found)
        row["versions"] = {a.version: r for a, r in zip(found, reports, strict=True)}
    if "case" not in row:
        row["case"] = searched(case, options.candidates)
    if options.gpu:
        made = {key: value for key, value in head().items() if key in ("date", "command")}
        row["measured"] = {**made, **measured(case, options.seconds)}
    return row


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ptxas", type=Path, required=True, help="folder of VERSION/bin/ptxas")
    parser.add_argument("--older-triton", type=Path, help="folder of an older Triton package")
    parser.add_argument("--kernels", nargs="*", default=list(REPORTS), choices=REPORTS)
    parser.add_argument("--candidates", type=int, default=40, help="of the static search")
    parser.add_argument("--gpu", action="store_true", help="also time and search on the GPU")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a search on the GPU")
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> int:
    """Compare all kernels; a second run goes on."""
    found = [Assembler.of(path) for path in options.ptxas.absolute().glob("*/bin/ptxas")]
    found.sort(key=lambda assembler: version_numbers(assembler.version))
    rows: dict[str, Row] = load(options.out)["rows"] if options.out.is_file() else {}
    for name in options.kernels:
        try:
            rows[name] = run_report(name, found, options, rows.get(name, {}))
        except NostallError as error:
            rows[name] = {**rows.get(name, {}), "failure": str(error)[:300]}
        case = rows[name].get("case", {})
        print(f"{name}: {rows[name].get('failure') or case['answer']}", case.get("losses"))
        kind = "measured" if any("measured" in row for row in rows.values()) else "static"
        save(options.out, kind=kind, rows=rows)
    return 0
