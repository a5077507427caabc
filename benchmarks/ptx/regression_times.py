"""How much time do kernels lose to a newer ptxas, and how much of it does the search recover?

    python -m benchmarks run ptx.regression_times --ptxas FOLDER --file kernels.pickle.gz --write
    python -m benchmarks run ptx.regression_times --ptxas FOLDER --file kernels.pickle.gz \\
        --seconds 8 --budget-s 230 --out benchmarks/ptx/results/regression_times.json.gz

FOLDER holds ``VERSION/bin/ptxas``, as for ``ptx.regressions``; the oldest and the newest version
are compared, and without the option those that are installed.  The first command
needs no GPU: it compiles the kernels of ``ptx.regressions`` for sm_90 and writes those to a file
that the newer version makes worse by a static property.  ``not_launchable`` has the others that it
makes worse, with the reason.

The second command first times each kernel as the older version makes it beside the binary of the
newer version, in a few interleaved samples (``screened``).  Where the newer one takes more time by
``--least``, ``nostall regress --objective gpu`` measures both anew, with a null
(``measured.older``), and searches the input of the newer version; what it finds is also compared
with the older binary itself (``beside_older``).  The order is that of the time that was lost.
"""

from __future__ import annotations

import argparse
import gzip
import json
import pickle
import statistics
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.harness.result_file import save
from benchmarks.ptx.comparison import comparison_record
from benchmarks.ptx.regressions import assemble, is_jump, jobs
from nostall.core.errors import NostallError
from nostall.gpu import Kernel, LocalGpu
from nostall.ptx.assemble.versions import Assembler, find_assemblers, version_numbers
from nostall.sass.binary.cubin import Cubin
from nostall.tuning.gpu_objective import decide
from nostall.tuning.regress.job import Binary, Case, compare, newer_binary, older_by_ptxas
from nostall.tuning.regress.losses import RECOVERED, excess
from nostall.tuning.regress.measured import measure
from nostall.tuning.settings import Settings
from nostall.tuning.sources.source import Source

SM = 90
SLOWER = 0.05
"""Part of the older binary's time from which on a kernel counts as slower."""
_OVERHEAD = 18.0
"""Seconds of a search beyond its own, at most, as far as is known."""
_PAIR = 3.0
"""Seconds of the first samples with the start of their process, at most, as far as is known."""
_COMPARED = {"rounds": 100, "checks": 4}
"""Samples and random inputs of a comparison."""

Row = dict[str, Any]


def read(path: Path, older: Assembler, newer: Assembler) -> tuple[dict[str, Case], dict[str, str]]:
    """The kernels of a file, and those that cannot be launched with the reason.

    ``older`` and ``newer`` are the installed ones of the versions that made the binaries.
    """
    if not path.is_file():
        return {}, {}
    cases, refused = pickle.loads(gzip.decompress(path.read_bytes()))
    installed = {assembler.version: assembler for assembler in (older, newer)}

    def here(binary: Binary) -> Binary:
        assert binary.assembler is not None
        return replace(binary, assembler=installed[binary.assembler.version])

    moved = {n: replace(c, older=here(c.older), newer=here(c.newer)) for n, c in cases.items()}
    return moved, refused


def write(options: argparse.Namespace, older: Assembler, newer: Assembler) -> None:
    """Compile the kernels, and add those to the file that the newer version makes worse."""
    cases, refused = read(options.file, older, newer)
    for name, compile_ in jobs(newer, options.configurations):
        is_wanted = any(fnmatch(name, pattern) for pattern in options.kernels)
        if not is_wanted or name in cases or name in refused:
            continue
        with suppress(NostallError):  # too much shared memory, or no such instruction
            source = compile_()
            if not is_jump(*assemble(source, (older, newer))):
                continue
            if (sm := Cubin.parse(source.cubin).sm) != SM:
                refused[name] = f"compiled for sm_{sm}"
            elif source.launch is None:
                refused[name] = "its launch is not known"
            else:
                plain = replace(source, provenance=dict(source.provenance))  # can be pickled
                cases[name] = make_case(plain, older, newer)
            print(name, refused.get(name, "kept"), flush=True)
            options.file.write_bytes(gzip.compress(pickle.dumps((ranked(cases), refused))))


def ranked(cases: Mapping[str, Case]) -> dict[str, Case]:
    """The kernels, the largest static losses first."""
    losses = {n: excess(c.older.properties, c.newer.properties) for n, c in cases.items()}
    return {name: cases[name] for name in sorted(cases, key=lambda name: -losses[name])}


def make_case(source: Source, older: Assembler, newer: Assembler) -> Case:
    """The kernel as both versions make it."""
    command, binary = newer_binary(source, newer)
    return Case(source, command, older_by_ptxas(source, command, older, binary), binary)


def screen(case: Case, settings: Settings) -> Row:
    """The static losses of a kernel, and the time of the newer binary over the older one's."""
    report = compare(case, None).to_json()
    static = {name: report[name] for name in ("kernel", "answer", "losses", "causes")}
    with _open(case, case.newer.cubin, settings) as gpu:
        outcome = gpu.evaluate(case.older.cubin)
        row: Row = {"static": static, "gpu": dict(gpu.info)}
    if outcome.timing is None:
        return {**row, "failure": f"{outcome.status}: {outcome.detail}"[:300]}
    newer, older = outcome.timing.original, outcome.timing.candidate
    ratio = statistics.median(a / b for a, b in zip(newer, older, strict=True))
    us = {name: [round(1e6 * s, 4) for s in side] for name, side in
          (("newer", newer), ("older", older))}  # fmt: skip
    return {**row, "screened": {"ratio": ratio, "us": us}}


def search(case: Case, settings: Settings) -> Row:
    """What ``nostall regress --objective gpu`` measures and finds, also beside the older binary."""
    began = monotonic()
    with _open(case, case.newer.cubin, settings) as gpu:
        measured = measure(case, settings, gpu)
    row: Row = {**measured.to_json(), "seconds": round(monotonic() - began, 1)}
    found = measured.found
    if found is not None and found.improved:
        row["search"] = {"stopped": found.search.stopped, "recipe": _changes(found.recipe)}
        with _open(case, case.older.cubin, settings) as gpu:
            decision = decide(gpu, found.cubin, **_COMPARED, seed=settings.seed)
        row["beside_older"] = comparison_record(decision)
    return row


def _changes(recipe: Any) -> Row | None:
    """The state of a recipe, without its orders."""
    if recipe is None:
        return None
    state = json.loads(recipe.state)
    return {key: len(value) if key == "orders" else value for key, value in state.items()}


def _open(case: Case, cubin: bytes, settings: Settings) -> LocalGpu:
    launch = case.source.launch
    assert launch is not None
    return LocalGpu(Kernel(cubin, case.source.kernel, launch), settings.measurement_plan)


def lost(row: Row) -> float:
    """Part of the older binary's time that the newer one takes more, in the first samples."""
    return float(row["screened"]["ratio"]) - 1.0 if "screened" in row else 0.0


def shown(row: Row) -> float | None:
    """The same by the comparison with a null; 0 if that shows none, None without one."""
    older = (row.get("measured") or {}).get("older", {})
    if "ratio" not in older:
        return None
    return float(older["ratio"]) - 1.0 if older["verdict"] == "faster" else 0.0


def summary(rows: dict[str, Row]) -> Row:
    """How many kernels were timed, are slower, and have their time back."""
    slower = [row["measured"] for row in rows.values() if (shown(row) or 0.0) >= SLOWER]
    shares = [row["recovered"] for row in slower]
    return {
        "kernels": len(rows),
        "timed": sum("screened" in row for row in rows.values()),
        "compared": sum(shown(row) is not None for row in rows.values()),
        "shown_slower": sum((shown(row) or 0.0) > 0 for row in rows.values()),
        "least_part": SLOWER,
        "slower": len(slower),
        "recovered": sum(share >= RECOVERED for share in shares),
        "recovered_median": round(statistics.median(shares), 4) if shares else None,
        "seconds": [row["seconds"] for row in slower],
    }


def line(name: str, row: Row) -> str:
    """A row of the table that is printed."""
    measured = row.get("measured") or {}
    if "screened" not in row:
        return f"{name:52.52} {row['failure']}"
    text = f"{name:52.52} newer / older {row['screened']['ratio']:.4f}"
    if (failure := measured.get("failure")) or shown(row) is None:
        return f"{text} {failure or ''}"
    older, share = measured["older"], measured["recovered"]
    times = f"{older['ratio']:.4f} [{older['low']:.4f}, {older['high']:.4f}]"
    answer = "none lost" if share is None else f"recovered {share:.0%}"
    return f"{text}, {times}: {answer} in {measured['seconds']} s"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ptxas", type=Path, help="folder of VERSION/bin/ptxas; default: the installed versions"
    )
    parser.add_argument("--file", type=Path, required=True, help="the kernels with both binaries")
    parser.add_argument("--write", action="store_true", help="write --file and stop; no GPU")
    parser.add_argument("--kernels", nargs="*", default=["*"], help="only these (patterns)")
    parser.add_argument(
        "--configurations", type=int, default=4, help="of each kernel of the suite, to write"
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="of the search of one kernel")
    parser.add_argument("--evaluations", type=int, help="most candidates of that search")
    parser.add_argument("--least", type=float, default=0.02, help="part of the time, to search")
    parser.add_argument("--budget-s", type=float, default=230.0, help="end after so many seconds")
    parser.add_argument("--out", type=Path)


def main(options: argparse.Namespace) -> int:
    """Write the kernels, or measure all of them and then search those that lost most."""
    until = monotonic() + options.budget_s
    given = options.ptxas.glob("*/bin/ptxas") if options.ptxas is not None else ()
    installed = [Assembler.of(path) for path in given] or find_assemblers()
    found = sorted(installed, key=lambda a: version_numbers(a.version))
    older, newer = found[0], found[-1]
    if options.write or not options.file.is_file():
        write(options, older, newer)
    if options.write:
        return 0
    cases, refused = read(options.file, older, newer)
    cases = {n: c for n, c in cases.items() if any(fnmatch(n, p) for p in options.kernels)}
    settings = Settings(
        "assembler",
        seconds=options.seconds,
        evaluations=options.evaluations,
        objective="gpu",
        rounds=_COMPARED["rounds"],
        checks=_COMPARED["checks"],
    )
    rows: dict[str, Row] = {}
    versions = [older.version, newer.version]

    def step(name: str, work: Callable[[], Row], key: str = "") -> None:
        try:
            row = work()
        except NostallError as error:
            row = {"failure": str(error)[:300]}
        rows[name] = {**rows[name], key: row} if key else row
        print(line(name, rows[name]), flush=True)
        about = {"summary": summary(rows), "ptxas": versions, "not_launchable": refused}
        save(options.out, kind="measured", **about, rows=rows)

    for name, case in cases.items():
        has_time = monotonic() + _PAIR < until - options.budget_s / 2
        step(name, partial(screen, case, settings) if has_time else _no_time)
    slower = [name for name in cases if lost(rows[name]) >= options.least]
    for name in sorted(slower, key=lambda name: -lost(rows[name])):
        has_time = monotonic() + (options.seconds or 0.0) + _OVERHEAD < until
        step(name, partial(search, cases[name], settings) if has_time else _no_time, "measured")
    print(json.dumps(summary(rows)))
    return 0


def _no_time() -> Row:
    return {"failure": "no time left"}
