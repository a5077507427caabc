"""Which kernels get worse static properties from a newer ptxas, and what does the search recover?

    python -m benchmarks run ptx.regressions --ptxas FOLDER --every 3 --candidates 40 \\
        --out benchmarks/ptx/results/regressions.json.gz

FOLDER holds ``VERSION/bin/ptxas`` for each version, as ``pip download --no-deps
nvidia-cuda-nvcc==VERSION`` (12.x: ``nvidia-cuda-nvcc-cu12``) and unpacking give them.  The kernels
are those of the corpus, of the suite and of users' code, compiled with the installed Triton, and
the PTX of nvcc.  Each version assembles each kernel with the compiler's options; PTX that is too
new for a version gets the ``.version`` that it knows.

``jumps`` are the pairs of consecutive versions between which a kernel spills more bytes, fits fewer
warps by its registers, or has at least 5 % more machine code.  For each kernel
with a jump, ``nostall regress`` compares the last version before its first jump with the newest
version; ``case`` has the losses, the causes, and the part of each loss that the search recovers
with the newest version.  No GPU is used: whether a loss costs time is not known.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.corpus.ptx_catalogue import ptx_texts
from tests.corpus.triton_kernels import ENTRIES

from benchmarks.harness.result_file import load, save
from benchmarks.kernels.new_projects.entries import new_project_entries
from benchmarks.kernels.suite import Entry, build, entries
from benchmarks.kernels.unseen import unseen_entries
from nostall.core import Budget
from nostall.core.errors import NostallError
from nostall.ptx.assemble.command import Command, plain_command, triton_commands
from nostall.ptx.assemble.ptxas import PtxasRun, run_ptxas
from nostall.ptx.assemble.versions import Assembler, version_numbers
from nostall.ptx.program.module import parse
from nostall.sass.binary.cubin import Cubin
from nostall.tuning.assembler.commands import read_options
from nostall.tuning.regress.job import Case, compare, lower_version, newer_binary, older_by_ptxas
from nostall.tuning.sources.ptx_source import load_ptx
from nostall.tuning.sources.source import Source
from nostall.tuning.sources.triton_source import compile_triton

ROOT = Path(__file__).resolve().parents[3]
CAPABILITIES = (80, 90, 100, 120)
MORE_CODE = 1.05
_OPTIONS_OF_THE_SUITE = 4
_WIDER: Mapping[str, tuple[int, tuple[int, ...]]] = {
    "paged_decode": (3, (256, 512)),
    "attention_dkdv": (2, (128, 256)),
    "attention_dq": (2, (128, 256)),
    "flash_attention": (3, (128, 256)),
    "fused_attention": (3, (128, 256)),
    "silu_attention": (2, (128,)),
    "int8_attention": (2, (128,)),
    "pair_bias_attention": (2, (64, 128)),
    "token_attention": (2, (256,)),
    "selected_attention": (2, (64, 256)),
    "retention": (2, (64, 256)),
    "mlstm_state": (2, (64, 256)),
    "lightning_attention": (2, (64, 256)),
    "selective_scan": (3, (32, 64)),
    "merge_attention": (2, (128, 256)),
}
"""Further problems: kernel -> (position in the problem, values), such as head dimensions."""

Row = dict[str, Any]


Job = tuple[str, Callable[[], Source]]
"""Name of a kernel, and the function that compiles it."""


def jobs(newest: Assembler, configurations: int = _OPTIONS_OF_THE_SUITE) -> Iterator[Job]:
    """All kernels: PTX of nvcc, the corpus of Triton kernels, the suite, users' code.

    ``configurations``: of each kernel of the suite, spread over its list.
    """
    for name, text in ptx_texts().items():
        if name.startswith("nvcc-"):
            for kernel in parse(text).kernels:
                yield f"{name}:{kernel.name}", partial(_load, text, kernel.name, newest)
    for entry in ENTRIES:
        for capability in (c for c in entry.capabilities if c in CAPABILITIES):
            arguments = (ROOT / entry.path, entry.launch, None, f"sm_{capability}")
            compile_ = partial(compile_triton, *arguments, options=entry.options)
            yield entry.name(capability), compile_
    known = (*entries(), *unseen_entries(), *new_project_entries())
    for entry in (*known, *wider_entries(known)):
        step = max(1, len(entry.options) // configurations) if entry.size else 1
        for options in entry.options[::step]:
            tile = "x".join(map(str, options.tile or ()))
            name = f"{entry.name} {tile} {options.num_warps} warps {options.num_stages} stages"
            yield name, partial(build, entry, options)


def wider_entries(known: Sequence[Entry]) -> Iterator[Entry]:
    """Entries with problems that ``known`` does not have: more registers for each thread."""
    problems = {(entry.name, entry.problem) for entry in known}
    for entry in known:
        place, values = _WIDER.get(entry.kernel, (0, ()))
        for value in values:
            wide = replace(entry, problem=replace_at(entry.problem, place, value))
            if (key := (wide.name, wide.problem)) not in problems:
                problems.add(key)
                yield wide


def replace_at(problem: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    """The problem with another value at ``place``."""
    return (*problem[:place], value, *problem[place + 1 :])


def _load(text: str, kernel: str, newest: Assembler) -> Source:
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        path = Path(folder, "nvcc.ptx")
        path.write_text(text)
        return load_ptx(path, kernel, installed=[newest])


def assemble(source: Source, assemblers: Sequence[Assembler]) -> list[Row]:
    """What each version reports of a kernel: registers, spills, bytes of code; or why it fails."""
    assert source.ptx is not None
    command = plain_command(source.ptx, (), source.provenance.get("arch"))
    if "triton" in source.provenance.get("compiler", ""):
        command = triton_commands(source.ptx, read_options(source.provenance["options"]))[0]
    rows: list[Row] = []
    for assembler in assemblers:
        run = _run(source.ptx, command, assembler)
        text, lowered = lower_version(source.ptx, run)
        run = _run(text, command, assembler) if lowered else run
        cubin, resources = run.cubin, run.resources.get(source.kernel)
        if resources is None:
            rows.append({"failure": run.detail[:120]})
            continue
        rows.append(
            {
                "code": machine_code(cubin),
                "registers": resources.registers,
                "spill_bytes": resources.spill_bytes,
                "words": sum(text.size for text in Cubin.parse(cubin).texts) // 16,
                "warps": 4 * (65536 // (128 * max(8, -(-resources.registers // 8) * 8))),
            }
        )
    return rows


def _run(ptx: str, command: Command, assembler: Assembler) -> PtxasRun:
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
        return run_ptxas(assembler, ptx, command.arguments(), Path(folder))


def machine_code(cubin: bytes) -> str:
    """Hash of the machine code."""
    texts = Cubin.parse(cubin).texts
    code = b"".join(cubin[text.file_offset :][: text.size] for text in texts)
    return hashlib.sha256(code).hexdigest()[:16]


def is_jump(before: Row, after: Row) -> bool:
    """Whether the newer version reports worse properties."""
    if "failure" in before or "failure" in after or before["code"] == after["code"]:
        return False
    return bool(
        after["spill_bytes"] > before["spill_bytes"]
        or after["warps"] < before["warps"]
        or after["words"] > MORE_CODE * before["words"] + 8
    )


def search(source: Source, older: Assembler, newest: Assembler, candidates: int) -> Row:
    """The comparison and the search of one kernel."""
    command, newer = newer_binary(source, newest)
    case = Case(source, command, older_by_ptxas(source, command, older, newer), newer)
    return searched(case, candidates)


def searched(case: Case, candidates: int) -> Row:
    """The report of a case and of the search for what was lost."""
    report = compare(case, Budget(evaluations=candidates)).to_json()
    del report["origin"]
    for name in ("older", "newer"):
        report[name] = {k: v for k, v in report[name].items() if k not in ("opcodes", "pipes")}
    if report["search"] is not None:
        del report["search"]["found"]
    return report


def summary(rows: dict[str, Row], versions: Sequence[str]) -> Row:
    """Totals: jumps by pair of versions, losses, and the part that was recovered."""
    pairs = list(itertools.pairwise(versions))
    cases = [row["case"] for row in rows.values() if "losses" in row.get("case", {})]
    lost = [case for case in cases if case["losses"]]
    shares = [s for c in lost if c["search"] for s in c["search"]["recovered"].values()]
    distinct = Counter(
        f"{a} to {b}"
        for row in rows.values()
        for (a, x), (b, y) in itertools.pairwise(zip(versions, row["versions"], strict=True))
        if "code" in x and "code" in y and x["code"] != y["code"]
    )
    return {
        "kernels": len(rows),
        "other_code": {f"{a} to {b}": distinct[f"{a} to {b}"] for a, b in pairs},
        "jumps": {
            f"{a} to {b}": sum([a, b] in row["jumps"] for row in rows.values()) for a, b in pairs
        },
        "compared": len(cases),
        "with_losses": len(lost),
        "losses": dict(Counter(loss["name"] for case in lost for loss in case["losses"])),
        "answers": dict(Counter(case["answer"] for case in cases)),
        "recovered_mean": round(statistics.mean(shares), 4) if shares else None,
        "older_offered": sum(bool((c["older_assembler"] or {}).get("offered")) for c in lost),
        "older_refused": sum((c["older_assembler"] or {}).get("offered") is False for c in lost),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ptxas", type=Path, required=True, help="folder of VERSION/bin/ptxas")
    parser.add_argument("--candidates", type=int, default=40, help="of the search of one kernel")
    parser.add_argument("--match", default="", help="only kernels with this in their name")
    parser.add_argument("--every", type=int, default=1, help="take every N-th kernel")
    parser.add_argument("--limit", type=int, help="search at most this many kernels more")
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> int:
    """Assemble all kernels with all versions, then search those with a jump."""
    paths = options.ptxas.glob("*/bin/ptxas")
    found = sorted(map(Assembler.of, paths), key=lambda a: version_numbers(a.version))
    versions = [assembler.version for assembler in found]
    done: Row = load(options.out) if options.out.is_file() else {}
    rows: dict[str, Row] = done.get("rows", {}) if done.get("ptxas") == versions else {}
    named = [job for job in jobs(found[-1]) if options.match in job[0]]
    kernels: dict[str, Source] = {}
    for name, compile_ in named[:: options.every]:
        row = rows.get(name, {"jumps": True})
        if row["jumps"] and "case" not in row:
            with suppress(NostallError):  # too much shared memory, or no such instruction
                kernels[name] = compile_()
    todo = [name for name in kernels if name not in rows]
    with ThreadPoolExecutor(2) as pool:
        reports = pool.map(partial(assemble, assemblers=found), (kernels[n] for n in todo))
        for name, report in zip(todo, reports, strict=True):
            pairs = itertools.pairwise(zip(versions, report, strict=True))
            jumps = [[a, b] for (a, x), (b, y) in pairs if is_jump(x, y)]
            rows[name] = {"versions": report, "jumps": jumps}
            if len(rows) % 20 == 0:
                print(f"{len(rows)} kernels assembled", flush=True)
    _save(options.out, rows, versions)
    waiting = [n for n in kernels if rows[n]["jumps"] and "case" not in rows[n]]
    for name in waiting[: options.limit]:
        before = found[versions.index(rows[name]["jumps"][0][0])]
        try:
            rows[name]["case"] = search(kernels[name], before, found[-1], options.candidates)
            print(f"{name}: {rows[name]['case']['answer']}", flush=True)
        except NostallError as error:
            rows[name]["case"] = {"failure": str(error)[:200]}
        _save(options.out, rows, versions)
    print(summary(rows, versions))
    return 0


def _save(path: Path, rows: dict[str, Row], versions: list[str]) -> None:
    save(path, summary=summary(rows, versions), ptxas=versions, rows=dict(sorted(rows.items())))
