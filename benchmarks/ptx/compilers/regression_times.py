"""How much time do kernels lose to a newer ptxas, and how much of it does the search recover?

    python -m benchmarks run ptx.regression_times --ptxas FOLDER --survey-s 90 --seconds 8 \\
        --budget-s 230 --out benchmarks/ptx/results/regression_times.json.gz

FOLDER holds ``VERSION/bin/ptxas``, as for ``ptx.regressions``; each older version is compared with
the newest one, and without the option those that are installed.  The kernels are those of
``ptx.regressions`` for sm_90.  ``--prepare CASES`` only compiles them, without a GPU, into the
folder CASES; with ``--cases CASES`` a run on a GPU needs the newest version alone.

All CPU cores compile them with all versions.  Each kernel whose machine code differs is timed as
the older versions make it beside the binary of the newest one, in a few interleaved samples
(``screened``); the fastest older version is the baseline.  ``not_timed`` has the others, with the
reason.  Where the newest one takes more time by ``--least``, ``static`` has what got worse by
static properties, and ``nostall regress --objective gpu`` measures both anew, with a null
(``measured.older``), and searches the input of the newest version; what it finds is also compared
with the older binary itself (``beside_older``).  The order is that of the time that was lost.  A
second run with the same versions goes on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pickle
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.harness.comparison import comparison_record
from benchmarks.harness.result_file import load, save
from benchmarks.ptx.compilers.regressions import Job, jobs, machine_code
from benchmarks.sass.build_comparison import BuildTimer, ProcessTimer
from nostall.core.errors import NostallError
from nostall.gpu import Kernel, LocalGpu
from nostall.ptx.assemble.command import Command
from nostall.ptx.assemble.pool import worker_count
from nostall.ptx.assemble.versions import Assembler, find_assemblers, version_numbers
from nostall.sass.binary.cubin import Cubin
from nostall.tuning.assembler.commands import find_command
from nostall.tuning.assembler.job import Setup
from nostall.tuning.gpu_objective import decide
from nostall.tuning.regress.job import Binary, Case, assemble_with, compare
from nostall.tuning.regress.losses import RECOVERED
from nostall.tuning.regress.measured import measure, open_search
from nostall.tuning.regress.properties import read_properties
from nostall.tuning.settings import Settings
from nostall.tuning.sources.source import Source

SM = 90
SLOWER = 0.05
"""Part of the older binary's time from which on a kernel counts as slower."""
SELECTED = "assembles to other machine code"
"""What the newest version does with the kernels that are timed."""
_OVERHEAD = 18.0
"""Seconds of a search beyond its own, at most, as far as is known."""
_WRITTEN = 25
"""Kernels after whose first samples the file is written."""
_SCREEN_ROUNDS = 12
"""First samples of each binary."""
_COMPARED = {"rounds": 100, "checks": 4}
"""Samples and random inputs of a comparison."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Builds:
    """A kernel as several versions of ptxas make it."""

    source: Source
    """Its cubin is that of the newest version."""
    command: Command
    older: Mapping[str, bytes]
    """Cubins by version, in the order of the versions; each with machine code of its own."""

    def case(self, version: str, newest: Assembler) -> Case:
        """The comparison of the newest version with an older one."""
        cubins = {newest.version: self.source.cubin, version: self.older[version]}
        newer, older = (
            Binary(f"ptxas {v}", c, read_properties(c, self.source.kernel, self.source.launch), a)
            for (v, c), a in zip(cubins.items(), (newest, None), strict=True)
        )
        return Case(self.source, self.command, older, newer)


Surveyed = tuple[str, Builds | str]
"""A kernel's name, and its builds, or why it is not timed."""


def survey(
    wanted: Sequence[Job], olders: Sequence[Assembler], newer: Assembler, workers: int, until: float
) -> Iterator[Surveyed]:
    """The kernels with all binaries, or why they are not timed, in the order of their ends."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        names = {pool.submit(try_builds, job, olders, newer): job[0] for job in wanted}
        try:
            for future in as_completed(names, timeout=max(0.0, until - monotonic())):
                yield names[future], future.result()
        except TimeoutError:
            print(f"{sum(not f.done() for f in names)} kernels were not compiled in time")
        pool.shutdown(wait=False, cancel_futures=True)


def prepared(folder: Path, until: float) -> Iterator[Surveyed]:
    """The kernels of a folder that ``--prepare`` wrote."""
    for path in sorted(folder.glob("*.pickle")):
        if monotonic() > until:
            print(f"{path.stem} and later files: no time left")
            return
        yield pickle.loads(path.read_bytes())


def prepare(folder: Path, found: Iterable[Surveyed]) -> None:
    """Write a file for each kernel."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, builds) in enumerate(found, len(list(folder.iterdir()))):
        Path(folder, f"{number:04}.pickle").write_bytes(pickle.dumps((name, builds)))
        print(f"{name}: {builds if isinstance(builds, str) else [*builds.older]}", flush=True)


def try_builds(job: Job, olders: Sequence[Assembler], newer: Assembler) -> Builds | str:
    """The kernel as all versions make it, or why it is not timed; runs in a worker."""
    try:
        source = job[1]()
        if (sm := Cubin.parse(source.cubin).sm) != SM:
            return f"compiled for sm_{sm}"
        if source.launch is None:
            return "its launch is not known"
        builds = make_builds(source, olders, newer)
    except NostallError as error:  # too much shared memory, or no such instruction
        return " ".join(str(error).split())[:200]
    return builds if builds.older else "same code"


def make_builds(source: Source, olders: Sequence[Assembler], newer: Assembler) -> Builds:
    """The kernel as the versions make it, without code that a newer one makes as well."""
    ptx, command = source.ptx, find_command(source, [newer]).command
    assert ptx is not None
    newest = assemble_with(ptx, command, newer, newer).run.cubin
    known, older = {machine_code(newest)}, {}
    for assembler in reversed(olders):
        cubin = assemble_with(ptx, command, assembler, newer).run.cubin
        if (code := machine_code(cubin)) not in known:
            known.add(code)
            older[assembler.version] = cubin
    plain = dict(source.provenance)  # can be pickled
    return Builds(replace(source, cubin=newest, provenance=plain), command, older)


def screen(builds: Builds, times: BuildTimer) -> Row:
    """The time of the newest binary over the fastest older one's, in a few samples."""
    source = builds.source
    cubins = (source.cubin, *builds.older.values())
    newer, *older = times([replace(source, cubin=c) for c in cubins], _SCREEN_ROUNDS)
    if texts := [value for value in (newer, *older) if isinstance(value, str)]:
        return {"failure": texts[0]}
    assert isinstance(newer, float)
    us = dict(zip(builds.older, older, strict=True))
    fastest = min(us, key=lambda version: us[version])
    times_us = {"newest": newer, **us}
    return {"screened": {"ratio": newer / us[fastest], "older": fastest, "us": times_us}}


def static_losses(case: Case) -> Row:
    """What got worse without a measurement."""
    report = compare(case, None).to_json()
    return {name: report[name] for name in ("kernel", "answer", "losses", "causes")}


def search(case: Case, settings: Settings, setup: Setup | None = None) -> Row:
    """What ``nostall regress --objective gpu`` measures and finds, also beside the older binary."""
    began = monotonic()
    with _open(case, case.newer.cubin, settings) as gpu:
        measured = measure(case, settings, gpu, setup)
        about = dict(gpu.info)
    row: Row = {**measured.to_json(), "gpu": about, "seconds": round(monotonic() - began, 1)}
    found = measured.found
    if found is not None:
        ended = {"stopped": found.search.stopped, "evaluations": found.search.evaluations}
        row["search"] = {**ended, "recipe": _changes(found.recipe)}
    if found is not None and found.improved:
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


def opened_ahead(cases: Iterator[Case]) -> Iterator[tuple[Case, Setup]]:
    """Each case with its workers; those of the next one start during a search."""

    def start(case: Case, stack: ExitStack) -> tuple[Case, Setup, ExitStack]:
        setup = stack.enter_context(open_search(case))
        return case, setup, stack

    with ExitStack() as all_stacks, ThreadPoolExecutor(1) as thread:

        def submit() -> Future[tuple[Case, Setup, ExitStack]] | None:
            case = next(cases, None)
            stack = all_stacks.enter_context(ExitStack())
            return None if case is None else thread.submit(start, case, stack)

        following = submit()
        while following is not None:
            case, setup, stack = following.result()
            following = submit()
            yield case, setup
            stack.close()


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
    timed = (measured.get("search") or {}).get("evaluations", 0)
    return f"{text}, {times}: {answer} in {measured['seconds']} s, {timed} evaluations"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ptxas", type=Path, help="folder of VERSION/bin/ptxas; default: the installed versions"
    )
    parser.add_argument("--prepare", type=Path, help="only compile the kernels into this folder")
    parser.add_argument("--cases", type=Path, help="folder that --prepare wrote")
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
    given = options.ptxas.absolute().glob("*/bin/ptxas") if options.ptxas is not None else ()
    installed = [Assembler.of(path) for path in given] or find_assemblers()
    found = sorted(installed, key=lambda a: version_numbers(a.version))
    *olders, newer = found
    end, workers = began + options.survey_s, options.workers or worker_count()
    if options.prepare is not None:
        wanted = selected(newer, options)
        prepare(options.prepare, survey(wanted, olders, newer, workers, end))
        return 0
    done: Row = load(options.out) if options.out.is_file() else {}
    is_same = done.get("newest") == newer.version
    rows: dict[str, Row] = done.get("rows", {}) if is_same else {}
    not_timed: dict[str, str] = done.get("not_timed", {}) if is_same else {}
    slower: dict[str, Builds] = {}

    def store(name: str, work: Callable[[], Row], key: str = "") -> None:
        try:
            row = work()
        except NostallError as error:
            row = {"failure": str(error)[:300]}
        rows[name] = {**rows[name], key: row} if key else row
        print(line(name, rows[name]), flush=True)

    def write() -> None:
        about = {"summary": summary(rows), "newest": newer.version, "selected": SELECTED}
        save(options.out, kind="measured", **about, not_timed=not_timed, rows=rows)

    if options.cases is not None:
        surveyed = prepared(options.cases, end)
    else:
        wanted = [job for job in selected(newer, options) if is_wanted(job[0], rows, not_timed)]
        surveyed = survey(wanted, olders, newer, workers, end)
    with ProcessTimer() as timer:
        for name, builds in surveyed:
            if isinstance(builds, str):
                not_timed[name] = builds
            elif is_wanted(name, rows, not_timed):
                if name not in rows:
                    store(name, partial(screen, builds, timer))
                if lost(rows[name]) >= options.least:
                    slower[name] = builds
                if len(rows) % _WRITTEN == 0:
                    write()
    write()
    settings = Settings(
        "assembler",
        seconds=options.seconds,
        evaluations=options.evaluations,
        objective="gpu",
        rounds=_COMPARED["rounds"],
        checks=_COMPARED["checks"],
    )
    order = sorted(slower, key=lambda name: -lost(rows[name]))
    cases = (slower[name].case(rows[name]["screened"]["older"], newer) for name in order)
    for name, (case, setup) in zip(order, opened_ahead(cases), strict=True):
        if monotonic() + (options.seconds or 0.0) + _OVERHEAD > began + options.budget_s:
            print(f"{name}: no time left")
            break
        rows[name]["static"] = static_losses(case)
        store(name, partial(search, case, settings, setup), "measured")
        write()
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
