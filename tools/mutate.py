"""Measure which small changes of a package its tests notice.

    python -m tools.mutate PACKAGE [--seed S] [--count N] [--seconds T] [--resume]
                                   [--survivors] [--tests PATH ...] [--budget T]
    python -m tools.mutate --summary

PACKAGE is a package or module below ``nostall``, such as ``sass.safety``.  The tests run in a clone
of the last commit in a temporary folder: once without a mutation, which records what each test
runs, and then, with each one of a seeded sample, those that run the changed function, the cheapest
first (:mod:`tools.relevant_tests`).  A test that fails kills a mutation; so does one that does not
end in several times its own time without a mutation.  The table in ``tools/mutants`` is written
after each mutation, so that Ctrl-C keeps what was found and ``--resume`` goes on there.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tools.mutation_table import DEFAULT_COUNT, HANGS, KILLED, SURVIVED, Row, Table, summary
from tools.mutations import Mutation, sample
from tools.relevant_tests import (
    ORDER,
    PLUGIN,
    RECORD,
    Relevant,
    function_at,
    is_compiled,
    read_record,
    with_probes,
)

ROOT = Path(__file__).resolve().parents[1]
TESTS = {
    "sass.safety": (
        "tests/unit/sass/safety",
        "tests/property/test_memory_order.py",
        "tests/property/test_moves.py",
        "tests/mutations",
    ),
    "parallel.simulate": (
        "tests/unit/parallel/simulate",
        "tests/unit/parallel/test_evaluation.py",
        "tests/unit/parallel/planners",
        "tests/property/test_parallel.py",
        "tests/property/test_plan_memory.py",
    ),
    "parallel.planners": ("tests/unit/parallel/planners", "tests/property/test_parallel.py"),
    "parallel.cluster": ("tests/unit/parallel/cluster", "tests/unit/parallel/simulate"),
    "ptx.safety": ("tests/unit/ptx/safety", "tests/mutations/ptx"),
}
"""Package -> its tests, if they are more than the folder of the same name in ``tests/unit``."""
SETTINGS = {"NOSTALL_CORPUS_SLICE": "12", "NOSTALL_MUTANTS": "2"}
"""As in ``make test``, with fewer seeded violations of each kind."""
BUDGET_S = 120.0
"""Seconds of the unchanged tests that run with one mutation; the cheapest ones are chosen."""
SLACK_FACTOR, SLACK_SECONDS = 5, 90.0
"""A test that takes this many times its time without a mutation, and these seconds more, hangs."""


class CannotMutate(Exception):
    """The package cannot be measured; the text says why and what to do."""


@dataclass(frozen=True)
class Clone:
    """A clone of the repository in which the tests of one package run."""

    root: Path
    package: str
    tests: tuple[str, ...]
    compiled: frozenset[str]
    """Files whose text decides compiled code: modules with numba, and those that these import."""

    def command(self, tests: Sequence[str]) -> list[str]:
        """The tests' command, as the table states it."""
        options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
        return ["python", "-m", "pytest", *options, *tests]

    def record(self, files: Iterable[str]) -> Relevant:
        """Run the unchanged tests; raises :class:`CannotMutate` if one fails."""
        texts = {file: (self.root / file).read_text() for file in files}
        times = {file: (self.root / file).stat() for file in texts}
        path = self.root / ".cache" / "record"
        path.unlink(missing_ok=True)
        try:
            for file, text in texts.items():
                (self.root / file).write_text(with_probes(file, text))
            outcome, failed = self._run(self.tests, 3600, {RECORD: str(path)})
        finally:
            for file, text in texts.items():
                _restore(self.root / file, text, times[file])
        if outcome != SURVIVED:
            raise CannotMutate(f"the unchanged tests fail ({failed or outcome}); mend them first")
        return read_record(path)

    def run(self, mutation: Mutation, tests: Mapping[str, int]) -> tuple[str, str]:
        """(outcome, name of the test that failed) of tests in this order with limits in seconds."""
        if not tests:
            return SURVIVED, ""
        order = self.root / ".cache" / "order"
        order.write_text(json.dumps(tests))
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        with _mutated(self.root, mutation), tempfile.TemporaryDirectory() as fresh:
            # numba decides by the file of a function alone whether its cache is valid.
            cache = {"NUMBA_CACHE_DIR": fresh} if mutation.file in self.compiled else {}
            limit_s = sum(tests.values()) + SLACK_SECONDS
            return self._run(["-x", *files], limit_s, {ORDER: str(order), **cache})

    def _run(
        self, tests: Sequence[str], seconds: float, variables: dict[str, str]
    ) -> tuple[str, str]:
        command = [sys.executable, *self.command(tests)[1:], "-p", PLUGIN]
        with subprocess.Popen(
            command, cwd=self.root, env=self.environment() | variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                output, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                return HANGS, ""
            finally:
                _end(process)
        failed = [line.split()[1] for line in output.splitlines() if line.startswith(_FAILURES)]
        if process.returncode == 0:
            return SURVIVED, ""
        if process.returncode == -signal.SIGALRM:
            return HANGS, ""
        if process.returncode == 5:  # no test was collected
            raise CannotMutate(f"{' '.join(self.tests)} has no tests; give a package with tests")
        return KILLED, failed[0] if failed else f"pytest ended with {process.returncode}"

    def environment(self) -> dict[str, str]:
        """The environment in which the clone's modules are imported."""
        return os.environ | {
            "PYTHONPATH": str(self.root / "src"),
            "NUMBA_CACHE_DIR": str(self.root / ".cache" / "numba"),
            **SETTINGS,
        }


_FAILURES = ("FAILED ", "ERROR ")


_SECONDS = itertools.count(1)


@contextmanager
def _mutated(root: Path, mutation: Mutation) -> Iterator[None]:
    """Apply a mutation to the clone for the duration of the block."""
    path = root / mutation.file
    text, times = path.read_text(), path.stat()
    path.write_text(mutation.apply(text))
    # Python and numba take a file of the same second and size for the same file.
    second = int(time.time()) + next(_SECONDS)
    os.utime(path, (second, second))
    try:
        yield
    finally:
        _restore(path, text, times)


def _restore(path: Path, text: str, times: os.stat_result) -> None:
    """Write the text and the file's old time, by which numba knows that its cache is valid."""
    path.write_text(text)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _end(process: subprocess.Popen[str]) -> None:
    """End the tests with all the processes that they started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _git(*arguments: str, root: Path) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@contextmanager
def cloned(root: Path, package: str, chosen: Sequence[str] = ()) -> Iterator[Clone]:
    """A clone of the last commit; raises :class:`CannotMutate` if the sources or the package's
    tests were changed since then."""
    source = Path("src/nostall", *package.split("."))
    paths = [path for path in (source, source.with_suffix(".py")) if (root / path).exists()]
    if not paths:
        raise CannotMutate(f"{source} does not exist; give a package such as sass.safety")
    folder = Path("tests/unit", *package.split("."))
    tests = tuple(chosen) or TESTS.get(package) or (str(folder),)
    if missing := [path for path in tests if not (root / path).exists()]:
        raise CannotMutate(f"{missing[0]} does not exist; add the package's tests to TESTS")
    if changed := _git("status", "--porcelain", "--", "src", *tests, root=root):
        raise CannotMutate(
            f"{changed.splitlines()[0].split()[-1]} is not committed; the clone has the last "
            "commit, so commit or stash your changes first"
        )
    with tempfile.TemporaryDirectory(prefix="nostall-mutate-") as temporary:
        clone = Path(temporary) / "clone"
        _git("clone", "--quiet", "--shared", str(root), str(clone), root=root)
        _copy_corpus(root / ".cache", clone / ".cache")
        shutil.copy(Path(__file__).with_name("relevant_tests.py"), clone / "src" / f"{PLUGIN}.py")
        made = Clone(clone, package, tests, _compiled_files(clone))
        where = subprocess.run(
            [sys.executable, "-c", "import nostall; print(nostall.__file__)"],
            cwd=temporary, env=made.environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        if not where.stdout.startswith(str(clone)):
            raise CannotMutate(
                f"python imports {where.stdout.strip() or where.stderr.strip()[-300:]} in place of "
                "the clone; run this tool with the repository's .venv/bin/python"
            )
        yield made


def _copy_corpus(source: Path, target: Path) -> None:
    """Give the clone a copy of the built cubins, and the older Triton, which nothing changes."""
    target.mkdir(exist_ok=True)
    if (source / "corpus").is_dir():
        shutil.copytree(source / "corpus", target / "corpus")
    for triton in source.glob("triton-*"):
        (target / triton.name).symlink_to(triton)


def _compiled_files(root: Path) -> frozenset[str]:
    """The modules that use numba and the modules of nostall that they import."""
    found: set[str] = set()
    for path in (root / "src").rglob("*.py"):
        text = path.read_text()
        if "numba" not in text:
            continue
        found.add(path.relative_to(root).as_posix())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nostall."):
                module = Path("src", *str(node.module).split("."))
                found |= {f"{module.as_posix()}.py", f"{module.as_posix()}/__init__.py"}
    return frozenset(found)


def describe(root: Path, mutation: Mutation) -> Row:
    """The columns of the table that say what a mutation changes."""
    text = (root / mutation.file).read_text()
    return {
        "file": mutation.file,
        "line": text.count("\n", 0, mutation.start) + 1,
        "operator": mutation.operator,
        "old": " ".join(text[mutation.start : mutation.end].split()),
        "new": " ".join(mutation.new.split()),
    }


def probe_of(root: Path, row: Row) -> str:
    """The function whose tests are relevant for a row; ``file::`` if all tests are."""
    text = (root / row["file"]).read_text()
    name = "" if is_compiled(text, row["line"]) else function_at(text, row["line"])
    return f"{row['file']}::{name}"


def measure(clone: Clone, table: Table, options: argparse.Namespace, commit: str) -> None:
    """Run the tests with each mutation of the sample that the table does not have yet."""
    folder = clone.root / "src" / "nostall" / Path(*clone.package.split("."))
    folder = folder if folder.is_dir() else folder.with_suffix(".py")
    chosen, total = sample(clone.root, folder, options.count, options.seed)
    began = time.monotonic()
    relevant = clone.record({mutation.file for mutation in chosen.values()})
    unchanged_s = sum(relevant.seconds.values())
    print(f"{clone.package}: {total} mutations; the unchanged tests take {unchanged_s:.0f} s")
    if not options.tests:
        _forget(table, set(chosen))
        table.head = {
            "package": clone.package,
            "tests": " ".join(
                [*(f"{k}={v}" for k, v in SETTINGS.items()), *clone.command(clone.tests)]
            ),
            "seed": options.seed,
            "mutations": total,
            "sample": min(options.count, len(chosen)),
            "unchanged_seconds": round(unchanged_s, 1),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
    for place, (name, mutation) in enumerate(chosen.items(), 1):
        known = table.rows.get(name, {})
        if known.get("outcome") not in ((SURVIVED, HANGS) if options.survivors else (None,)):
            continue
        if time.monotonic() - began > options.seconds:
            print(f"--seconds {options.seconds:g} is over; go on with --resume")
            break
        row = describe(clone.root, mutation)
        tests, count = relevant.order(probe_of(clone.root, row), options.budget)
        start = time.monotonic()
        limits = {t: int(SLACK_FACTOR * relevant.seconds[t] + SLACK_SECONDS) for t in tests}
        outcome, failed = clone.run(mutation, limits)
        if options.tests and outcome != KILLED:
            continue
        row |= {"outcome": outcome, "failed": failed, "tests": len(tests), "relevant": count}
        row |= {"seconds": round(time.monotonic() - start, 1), "commit": commit}
        if known and outcome != KILLED:
            row |= {k: v for k, v in known.items() if k == "explanation"}
        if options.survivors and outcome == KILLED:
            row["was"] = known.get("was", known["outcome"])
        table.rows[name] = {"name": name, **row}
        table.save()
        at = f"{row['file'].removeprefix('src/nostall/')}:{row['line']}"
        print(
            f"[{place}/{len(chosen)}] {outcome:8} {row['seconds']:4.0f} s  {at}  "
            f"{row['old'][:40]} -> {row['new'][:40]}",
            flush=True,
        )


def _forget(table: Table, names: set[str]) -> None:
    """Take the rows out whose mutations are not in the sample, because the source has changed."""
    if old := sorted(set(table.rows) - names):
        print(f"{len(old)} rows are not in the sample of this source and leave the table")
        table.rows = {name: row for name, row in table.rows.items() if name in names}
        table.save()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("package", nargs="?", help="below nostall, such as sass.safety")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=DEFAULT_COUNT, help="size of the sample")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time limit")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds of tests for each")
    parser.add_argument("--resume", action="store_true", help="go on with the table that exists")
    parser.add_argument("--survivors", action="store_true", help="run only these again")
    parser.add_argument("--tests", nargs="+", default=(), help="run only these, with --survivors")
    parser.add_argument("--summary", action="store_true", help="print the tables' results")
    options = parser.parse_args(arguments)
    if options.tests and not options.survivors:
        parser.error("--tests needs --survivors")
    if not options.package and not options.summary:
        parser.error("give a package, such as sass.safety, or --summary")
    return options


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Measure one package; returns the exit code."""
    options = _parse(arguments)
    if options.summary:
        print(summary(root / "tools" / "mutants"), end="")
        return 0
    path = root / "tools" / "mutants" / f"{options.package}.json"
    table = Table(path)
    try:
        if table.head and not (options.resume or options.survivors):
            raise CannotMutate(f"{path} exists; give --resume to go on, or remove it")
        if table.head and table.head["seed"] != options.seed:
            raise CannotMutate(
                f"{path} has seed {table.head['seed']}; give --seed {table.head['seed']}"
            )
        with cloned(root, options.package, options.tests) as clone:
            measure(clone, table, options, _git("rev-parse", "--short=12", "HEAD", root=root))
    except CannotMutate as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print(f"\ninterrupted; {path} has what was found; go on with --resume", file=sys.stderr)
        return 130
    counts = Counter(row["outcome"] for row in table.rows.values())
    print(f"{len(table.rows)} of {options.count}: {dict(counts)}; {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
