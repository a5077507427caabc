"""Measure which small changes of a package its tests notice.

    python -m tools.mutate PACKAGE [--seed S] [--count N] [--seconds T] [--resume] [--survivors]

PACKAGE is a package or module below ``nostall``, such as ``sass.safety``.  The tests run in a clone
of the last commit in a temporary folder, once without a mutation and once with each one of a seeded
sample.  A test that fails kills a mutation; so does a run that does not end in several times the
time of the unchanged tests.  The table in ``tools/mutants`` is written after each mutation, so that
Ctrl-C keeps what was found and ``--resume`` goes on there.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tools.mutations import Mutation, sample

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_COUNT = 60
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
    ),
    "parallel.planners": ("tests/unit/parallel/planners", "tests/property/test_parallel.py"),
    "parallel.cluster": ("tests/unit/parallel/cluster", "tests/unit/parallel/simulate"),
    "ptx.safety": ("tests/unit/ptx/safety", "tests/mutations/ptx"),
}
"""Package -> its tests, if they are more than the folder of the same name in ``tests/unit``."""
SETTINGS = {"NOSTALL_CORPUS_SLICE": "12", "NOSTALL_MUTANTS": "2"}
"""As in ``make test``, with fewer seeded violations of each kind."""
SLACK_FACTOR, SLACK_SECONDS = 4, 60.0
"""A run that takes this many times the unchanged tests, and these seconds more, hangs."""
KILLED, SURVIVED, HANGS = "killed", "survived", "timeout"
Row = dict[str, Any]


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

    def command(self) -> list[str]:
        """The tests' command, as the table states it."""
        marks = "not slow and not gpu"
        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", marks]
        return ["python", "-m", "pytest", *options, *self.tests]

    def run(self, seconds: float, mutation: Mutation | None = None) -> tuple[str, str]:
        """(outcome, name of the test that failed) of the tests, which may take ``seconds``."""
        # numba looks only at the file of a function itself to decide whether its cache is valid.
        is_compiled = mutation is not None and mutation.file in self.compiled
        with _mutated(self.root, mutation), tempfile.TemporaryDirectory() as fresh:
            cache = fresh if is_compiled else str(self.root / ".cache" / "numba")
            with subprocess.Popen(
                [sys.executable, *self.command()[1:]],
                cwd=self.root,
                env=self.environment() | {"NUMBA_CACHE_DIR": cache},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            ) as process:
                try:
                    output, _ = process.communicate(timeout=seconds)
                except subprocess.TimeoutExpired:
                    return HANGS, ""
                finally:
                    _end(process)
        failed = [line.split()[1] for line in output.splitlines() if line.startswith(_FAILURES)]
        if process.returncode == 0:
            return SURVIVED, ""
        if process.returncode == 5:  # no test was collected
            raise CannotMutate(f"{' '.join(self.tests)} has no tests; give a package with tests")
        return KILLED, failed[0] if failed else f"pytest ended with {process.returncode}"

    def environment(self) -> dict[str, str]:
        """The environment in which the clone's modules are imported, and no byte code is kept."""
        return os.environ | {
            "PYTHONPATH": str(self.root / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            **SETTINGS,
        }


_FAILURES = ("FAILED ", "ERROR ")


@contextmanager
def _mutated(root: Path, mutation: Mutation | None) -> Iterator[None]:
    """Apply a mutation to the clone for the duration of the block."""
    if mutation is None:
        yield
        return
    path = root / mutation.file
    text = path.read_text()
    path.write_text(mutation.apply(text))
    try:
        yield
    finally:
        path.write_text(text)


def _end(process: subprocess.Popen[str]) -> None:
    """End the tests with all the processes that they started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _git(*arguments: str, root: Path) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@contextmanager
def cloned(root: Path, package: str) -> Iterator[Clone]:
    """A clone of the last commit; raises :class:`CannotMutate` if files were changed since then."""
    if changed := _git("status", "--porcelain", "--", "src", "tests", root=root):
        raise CannotMutate(
            f"{changed.splitlines()[0].split()[-1]} is not committed; the clone has the last "
            "commit, so commit or stash your changes first"
        )
    source = Path("src/nostall", *package.split("."))
    paths = [path for path in (source, source.with_suffix(".py")) if (root / path).exists()]
    if not paths:
        raise CannotMutate(f"{source} does not exist; give a package such as sass.safety")
    folder = Path("tests/unit", *package.split("."))
    tests = TESTS.get(package) or (str(folder),)
    if missing := [path for path in tests if not (root / path).exists()]:
        raise CannotMutate(f"{missing[0]} does not exist; add the package's tests to TESTS")
    with tempfile.TemporaryDirectory(prefix="nostall-mutate-") as temporary:
        clone = Path(temporary) / "clone"
        _git("clone", "--quiet", "--shared", str(root), str(clone), root=root)
        _copy_corpus(root / ".cache", clone / ".cache")
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


class Table:
    """The results of one package, in a JSON file with one row per mutation."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head: dict[str, Any] = {}
        self.rows: dict[int, Row] = {}
        if path.exists():
            self.head = json.loads(path.read_text())
            self.rows = {row["number"]: row for row in self.head.pop("mutants")}

    def has(self, number: int, row: Row) -> bool:
        """Whether the table has a result for the same mutation."""
        known = self.rows.get(number, {})
        return all(known.get(key) == row[key] for key in ("file", "operator", "old", "new"))

    def save(self) -> None:
        """Write the file, the rows in the order of the sample."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        counts = Counter(row["outcome"] for row in self.rows.values())
        head = {**self.head, "done": len(self.rows), "outcomes": dict(sorted(counts.items()))}
        rows = ",\n  ".join(json.dumps(self.rows[number]) for number in sorted(self.rows))
        text = json.dumps(head, indent=1).removesuffix("\n}")
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(f'{text},\n "mutants": [\n  {rows}\n ]\n}}\n')
        temporary.replace(self.path)


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


def measure(clone: Clone, table: Table, options: argparse.Namespace, commit: str) -> None:
    """Run the tests with each mutation of the sample that the table does not have yet."""
    folder = clone.root / "src" / "nostall" / Path(*clone.package.split("."))
    folder = folder if folder.is_dir() else folder.with_suffix(".py")
    chosen, total = sample(clone.root, folder, options.count, options.seed)
    began = time.monotonic()
    outcome, failed = clone.run(3600)
    if outcome != SURVIVED:
        raise CannotMutate(f"the unchanged tests fail ({failed or outcome}); mend them first")
    unchanged_s = time.monotonic() - began
    limit = SLACK_FACTOR * unchanged_s + SLACK_SECONDS
    print(f"{clone.package}: {total} mutations; the unchanged tests take {unchanged_s:.0f} s")
    table.head = {
        "package": clone.package,
        "tests": " ".join([*(f"{k}={v}" for k, v in SETTINGS.items()), *clone.command()]),
        "seed": options.seed,
        "mutations": total,
        "sample": options.count,
        "unchanged_seconds": round(unchanged_s, 1),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    for number, mutation in enumerate(chosen, 1):
        row = describe(clone.root, mutation)
        is_known = table.has(number, row)
        is_again = options.survivors and table.rows.get(number, {}).get("outcome") == SURVIVED
        if (is_known and not is_again) or (options.survivors and not is_again):
            continue
        if time.monotonic() - began > options.seconds:
            print(f"--seconds {options.seconds:g} is over; go on with --resume")
            break
        start = time.monotonic()
        outcome, failed = clone.run(limit, mutation)
        seconds = time.monotonic() - start
        kept = {k: v for k, v in table.rows.get(number, {}).items() if k == "explanation"}
        row |= {"outcome": outcome, "failed": failed, "seconds": round(seconds, 1)}
        table.rows[number] = {"number": number, **row, "commit": commit} | (
            kept if is_known and outcome == SURVIVED else {}
        )
        table.save()
        place = f"{row['file'].removeprefix('src/nostall/')}:{row['line']}"
        change = f"{row['old'][:40]} -> {row['new'][:40]}"
        print(
            f"[{number}/{len(chosen)}] {outcome:8} {seconds:4.0f} s  {place}  {change}", flush=True
        )


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Measure one package; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("package", help="below nostall, such as sass.safety")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=DEFAULT_COUNT, help="size of the sample")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time limit")
    parser.add_argument("--resume", action="store_true", help="go on with the table that exists")
    parser.add_argument("--survivors", action="store_true", help="run only these again")
    options = parser.parse_args(arguments)
    path = root / "tools" / "mutants" / f"{options.package}.json"
    is_continued = options.resume or options.survivors
    if path.exists() and not is_continued:
        parser.error(f"{path} exists; give --resume to go on, or remove it")
    table = Table(path)
    if table.head and table.head["seed"] != options.seed:
        parser.error(f"{path} has seed {table.head['seed']}; give --seed {table.head['seed']}")
    try:
        with cloned(root, options.package) as clone:
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
