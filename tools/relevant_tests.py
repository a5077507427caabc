"""Find which tests run which functions, and run the tests of one function, cheapest first.

The file is also a pytest plugin: a clone holds a copy named ``PLUGIN`` among its sources.  With
``RECORD`` in the environment the plugin writes what each test runs; with ``ORDER`` it runs only the
tests of a JSON file, in their order and within their limits in seconds.  Functions report
themselves by a call that :func:`with_probes` inserts, also in the processes that a test starts.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PLUGIN = "nostall_relevant_tests"
RECORD, ORDER = "NOSTALL_RELEVANT_RECORD", "NOSTALL_RELEVANT_ORDER"
_seen: set[str] = set()
_writes = {"as": ""}
"""Name under which probes are written: the fixture's or the test's; empty: pytest's variable."""

_limits: dict[str, int] = {}
"""Test -> seconds that it may take."""


def hit(probe: str) -> None:
    """Note that the running test, or the fixture that is set up, calls a function."""
    if probe in _seen:
        return
    _seen.add(probe)
    test = _writes["as"] or os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    _write([test, probe])


def _write(line: list[Any]) -> None:
    path = os.environ.get(RECORD)
    if path:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.write(handle, (json.dumps(line) + "\n").encode())
        os.close(handle)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Generator[None, object, object]:
    """Give what a fixture of several tests runs to all of these tests."""
    if fixturedef.scope == "function":
        return (yield)
    _seen.clear()
    before, _writes["as"] = _writes["as"], f"fixture {fixturedef.argname}"
    try:
        return (yield)
    finally:
        _writes["as"] = before
        _seen.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note the time of a test with its fixtures, or end a process that exceeds the test's limit."""
    _seen.clear()
    if item.nodeid in _limits:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends compiled loops, too
        signal.alarm(_limits[item.nodeid])
    began = time.perf_counter()
    result = yield
    signal.alarm(0)
    fixtures = list(getattr(item, "fixturenames", ()))
    _write([item.nodeid, round(time.perf_counter() - began, 3), fixtures])
    return result


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of the order's file, in its order."""
    path = os.environ.get(ORDER)
    if path:
        _limits.update(json.loads(Path(path).read_text()))
        place = {test: number for number, test in enumerate(_limits)}
        kept = [item for item in items if item.nodeid in place]
        items[:] = sorted(kept, key=lambda item: place[item.nodeid])


@dataclass(frozen=True)
class Relevant:
    """What each test runs, and for how many seconds."""

    seconds: dict[str, float]
    """Test -> seconds with its fixtures."""
    probes: dict[str, frozenset[str]]
    """Test -> names of the functions that it runs."""

    def order(self, probe: str, budget_s: float) -> tuple[list[str], int]:
        """(tests to run, number of the relevant tests) for a change in one function.

        An empty function name stands for a change outside functions: then all tests are
        relevant, those first that run a function of the file.  The files with the cheapest tests
        come first; the tests that would exceed ``budget_s`` are left out.
        """
        is_module = probe.endswith("::")
        groups: dict[tuple[bool, str], list[str]] = defaultdict(list)
        for test, found in self.probes.items():
            is_near = any(p.startswith(probe) for p in found) if is_module else probe in found
            if is_near or is_module:
                groups[not is_near, test.partition("::")[0]].append(test)
        ordered: list[str] = []
        for _, tests in sorted(
            groups.items(), key=lambda group: (group[0][0], self._mean(group[1]))
        ):
            ordered += sorted(tests, key=self.seconds.__getitem__)
        chosen, total = [], 0.0
        for test in ordered:
            if total + self.seconds[test] <= budget_s or not chosen:
                chosen.append(test)
                total += self.seconds[test]
        return chosen, len(ordered)

    def _mean(self, tests: Sequence[str]) -> float:
        return sum(self.seconds[test] for test in tests) / len(tests)


def read_record(path: Path) -> Relevant:
    """The tests of a run with ``RECORD``."""
    seconds: dict[str, float] = {}
    fixtures: dict[str, list[str]] = {}
    found: dict[str, set[str]] = defaultdict(set)
    for line in path.read_text().splitlines():
        name, value, *rest = json.loads(line)
        if rest:
            seconds[name], fixtures[name] = value, rest[0]
        else:
            found[name].add(value)
    probes = {
        test: frozenset(found[test].union(*(found[f"fixture {name}"] for name in names)))
        for test, names in fixtures.items()
    }
    return Relevant(seconds, probes)


def function_at(text: str, line: int) -> str:
    """Name of the innermost function with a probe whose body holds a line; empty if none does.

    Names are qualified by their lines, because a file can define one name twice.
    """
    inside = [f for f in _functions(ast.parse(text)) if _first_line(f) <= line <= _end(f)]
    return _name(max(inside, key=lambda f: f.lineno)) if inside else ""


def with_probes(file: str, text: str) -> str:
    """The text of a module whose functions report ``file::function``."""
    lines = text.splitlines(keepends=True)
    places = []
    for function in _functions(ast.parse(text)):
        number, column = _first_line(function), _body(function)[0].col_offset
        call = f'__import__("{PLUGIN}").hit("{file}::{_name(function)}")'
        is_alone = not lines[number - 1].encode()[:column].strip()
        places.append((number, column, call, is_alone))
    for number, column, call, is_alone in sorted(places, reverse=True):
        line = lines[number - 1].encode()
        end = "\n" + " " * column if is_alone else "; "
        lines[number - 1] = (line[:column] + (call + end).encode() + line[column:]).decode()
    return "".join(lines)


def is_compiled(text: str, line: int) -> bool:
    """Whether a line is in a function that a just-in-time compiler reads, which has no probe."""
    return any(
        function.lineno <= line <= _end(function)
        for function in ast.walk(ast.parse(text))
        if isinstance(function, ast.FunctionDef) and _is_jit(function)
    )


_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(node: ast.AST) -> Iterable[_Function]:
    """The functions whose bodies can hold a probe, also those inside others."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function):
            if _is_jit(child):
                continue
            if _body(child):
                yield child
        yield from _functions(child)


def _is_jit(function: _Function) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def _body(function: _Function) -> list[ast.stmt]:
    """The statements after the docstring."""
    return function.body[1:] if ast.get_docstring(function) is not None else function.body


def _first_line(function: _Function) -> int:
    """The first line of the body, which can be that of a decorator."""
    first = _body(function)[0]
    return min([first.lineno, *(d.lineno for d in getattr(first, "decorator_list", ()))])


def _name(function: _Function) -> str:
    return f"{function.name}:{function.lineno}"


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno
