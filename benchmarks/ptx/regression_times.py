"""How much time do kernels lose to a newer ptxas, and how much of it does the search recover?

    python -m benchmarks run ptx.regression_times --ptxas FOLDER --survey-s 90 --seconds 8 \\
        --budget-s 230 --out benchmarks/ptx/results/regression_times.json.gz

FOLDER holds ``VERSION/bin/ptxas``, as for ``ptx.regressions``; the oldest and the newest version
are compared, and without the option those that are installed.  The kernels are those of
``ptx.regressions`` for sm_90.

All CPU cores compile them with both versions.  Each kernel whose machine code differs is timed as
the older version makes it beside the binary of the newer one, in a few interleaved samples
(``screened``); ``static`` has what got worse without a measurement.  ``not_timed`` has the others,
with the reason.  Where the newer one takes more time by ``--least``, ``nostall regress --objective
gpu`` then measures both anew, with a null (``measured.older``), and searches the input of the newer
version; what it finds is also compared with the older binary itself (``beside_older``).  The order
is that of the time that was lost.  A second run with the same versions goes on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.harness.comparison import comparison_record
from benchmarks.harness.result_file import load, save
from benchmarks.ptx.regressions import Job, jobs
from benchmarks.sass.build_comparison import BuildTimer, ProcessTimer
from nostall.core.errors import NostallError
from nostall.gpu import Kernel, LocalGpu
from nostall.ptx.assemble.pool import worker_count
from nostall.ptx.assemble.versions import Assembler, find_assemblers, version_numbers
from nostall.sass.binary.code_hash import code_sha256
from nostall.sass.binary.cubin import Cubin
from nostall.tuning.gpu_objective import decide
from nostall.tuning.regress.job import Case, compare, newer_binary, older_by_ptxas
from nostall.tuning.regress.losses import RECOVERED
from nostall.tuning.regress.measured import measure
from nostall.tuning.settings import Settings
from nostall.tuning.sources.source import Source

SM = 90
SLOWER = 0.05
"""Part of the older binary's time from which on a kernel counts as slower."""
SELECTED = "assembles to other machine code"
"""What the newer version does with the kernels that are timed."""
_OVERHEAD = 18.0
"""Seconds of a search beyond its own, at most, as far as is known."""
_SCREEN_ROUNDS = 12
"""First samples of each binary."""
_COMPARED = {"rounds": 100, "checks": 4}
"""Samples and random inputs of a comparison."""

Row = dict[str, Any]


def survey(
    wanted: Sequence[Job], older: Assembler, newer: Assembler, workers: int, until: float
) -> Iterator[tuple[str, Case | str]]:
    """The kernels with both binaries, or why they are not timed, in the order of their ends."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        names = {pool.submit(try_case, job, older, newer): job[0] for job in wanted}
        try:
            for future in as_completed(names, timeout=max(0.0, until - monotonic())):
                yield names[future], future.result()
        except TimeoutError:
            print(f"{sum(not f.done() for f in names)} kernels were not compiled in time")
        pool.shutdown(wait=False, cancel_futures=True)


def try_case(job: Job, older: Assembler, newer: Assembler) -> Case | str:
    """The kernel as both versions make it, or why it is not timed; runs in a worker."""
    try:
        source = job[1]()
        if (sm := Cubin.parse(source.cubin).sm) != SM:
            return f"compiled for sm_{sm}"
        if source.launch is None:
            return "its launch is not known"
        plain = replace(source, provenance=dict(source.provenance))  # can be pickled
        case = make_case(plain, older, newer)
    except NostallError as error:  # too much shared memory, or no such instruction
        return " ".join(str(error).split())[:200]
    same = code_sha256(case.older.cubin) == code_sha256(case.newer.cubin)
    return "same code" if same else case


def make_case(source: Source, older: Assembler, newer: Assembler) -> Case:
    """The kernel as both versions make it."""
    command, binary = newer_binary(source, newer)
    return Case(source, command, older_by_ptxas(source, command, older, binary), binary)


def screen(case: Case, times: BuildTimer) -> Row:
    """The static losses of a kernel, and the time of the newer binary over the older one's."""
    report = compare(case, None).to_json()
    static = {name: report[name] for name in ("kernel", "answer", "losses", "causes")}
    builds = [replace(case.source, cubin=b.cubin) for b in (case.newer, case.older)]
    newer, older = times(builds, _SCREEN_ROUNDS)
    if isinstance(newer, str) or isinstance(older, str):
        return {"static": static, "failure": str(newer if isinstance(newer, str) else older)}
    us = {"newer": newer, "older": older}
    return {"static": static, "screened": {"ratio": newer / older, "us": us}}


def search(case: Case, settings: Settings) -> Row:
    """What ``nostall regress --objective gpu`` measures and finds, also beside the older binary."""
    began = monotonic()
    with _open(case, case.newer.cubin, settings) as gpu:
        measured = measure(case, settings, gpu)
        about = dict(gpu.info)
    row: Row = {**measured.to_json(), "gpu": about, "seconds": round(monotonic() - began, 1)}
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
    parser.add_argument("--kernels", nargs="*", default=["*"], help="only these (patterns)")
    parser.add_argument("--configurations", type=int, default=4, help="of each kernel of the suite")
    parser.add_argument("--survey-s", type=float, default=90.0, help="end of the first samples")
    parser.add_argument("--workers", type=int, help="processes that compile; default: all cores")
    parser.add_argument("--seconds", type=float, default=8.0, help="of the search of one kernel")
    parser.add_argument("--evaluations", type=int, help="most candidates of that search")
    parser.add_argument("--least", type=float, default=0.02, help="part of the time, to search")
    parser.add_argument("--budget-s", type=float, default=230.0, help="end after so many seconds")
    parser.add_argument("--out", type=Path)


def main(options: argparse.Namespace) -> int:
    """Time all kernels briefly, then compare and search those that lost most."""
    began = monotonic()
    given = options.ptxas.glob("*/bin/ptxas") if options.ptxas is not None else ()
    installed = [Assembler.of(path) for path in given] or find_assemblers()
    found = sorted(installed, key=lambda a: version_numbers(a.version))
    older, newer = found[0], found[-1]
    versions = [older.version, newer.version]
    done: Row = load(options.out) if options.out.is_file() else {}
    is_same = done.get("ptxas") == versions
    rows: dict[str, Row] = done.get("rows", {}) if is_same else {}
    not_timed: dict[str, str] = done.get("not_timed", {}) if is_same else {}
    cases: dict[str, Case] = {}

    def store(name: str, work: Callable[[], Row], key: str = "") -> None:
        try:
            row = work()
        except NostallError as error:
            row = {"failure": str(error)[:300]}
        rows[name] = {**rows[name], key: row} if key else row
        print(line(name, rows[name]), flush=True)
        about = {"summary": summary(rows), "ptxas": versions, "selected": SELECTED}
        about |= {"not_timed": not_timed}
        save(options.out, kind="measured", **about, rows=rows)

    wanted = [job for job in selected(newer, options) if is_wanted(job[0], rows, not_timed)]
    end = began + options.survey_s
    with ProcessTimer() as timer:
        workers = options.workers or worker_count()
        for name, case in survey(wanted, older, newer, workers, end):
            if isinstance(case, str):
                not_timed[name] = case
                continue
            cases[name] = case
            if name not in rows:
                store(name, partial(screen, case, timer))
    settings = Settings(
        "assembler",
        seconds=options.seconds,
        evaluations=options.evaluations,
        objective="gpu",
        rounds=_COMPARED["rounds"],
        checks=_COMPARED["checks"],
    )
    slower = [n for n in cases if lost(rows[n]) >= options.least and shown(rows[n]) is None]
    for name in sorted(slower, key=lambda name: -lost(rows[name])):
        if monotonic() + (options.seconds or 0.0) + _OVERHEAD > began + options.budget_s:
            print(f"{name}: no time left")
            break
        store(name, partial(search, cases[name], settings), "measured")
    print(json.dumps(summary(rows)))
    return 0


def selected(newer: Assembler, options: argparse.Namespace) -> list[Job]:
    """The kernels that may run on the GPU, those of users and of the suite first."""
    named = [
        (name, compile_)
        for name, compile_ in jobs(newer, options.configurations)
        if any(fnmatch(name, pattern) for pattern in options.kernels)
        and (".sm_" not in name or name.endswith(f".sm_{SM}"))
    ]
    return sorted(named, key=lambda job: ".sm_" in job[0])


def is_wanted(name: str, rows: Mapping[str, Row], not_timed: Mapping[str, str]) -> bool:
    """Whether a kernel is compiled: an earlier run has not timed it, or not searched its loss."""
    if name not in rows:
        return name not in not_timed
    return lost(rows[name]) >= SLOWER and shown(rows[name]) is None
