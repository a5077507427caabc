"""Which tests run a function: probes, the record of a run, and the order of tests."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tools.relevant_tests import ORDER, PLUGIN, RECORD, function_at, is_compiled, with_probes

from tools import relevant_tests

SOURCE = '''"""A module."""
import functools

LIMIT = 3


def outer(x=LIMIT):
    """Outer.

    More.
    """
    @functools.cache
    def inner():
        return 1

    return inner() + x


def one(): return 1


@njit(cache=True)
def fast(x):
    return x


class Thing:
    é = 1

    def method(self):
        if self:
            return 2
'''
TESTS = """import subprocess, sys
import pytest
from sample import Thing, one, outer


@pytest.fixture(scope="module")
def made():
    return outer()


@pytest.fixture
def own():
    return one()


def test_fixture(made):
    assert made == 4


def test_uses_the_same_fixture(made):
    import time
    time.sleep(0.3)


def test_own(own):
    pass


def test_child():
    subprocess.run([sys.executable, "-c", "from sample import Thing; Thing().method()"], check=True)


def test_nothing():
    pass
"""


@pytest.mark.parametrize(
    ("line", "name"),
    [(4, ""), (7, ""), (9, ""), (12, "outer:7"), (14, "inner:13"), (16, "outer:7"),
     (19, "one:19"), (24, ""), (28, ""), (32, "method:30"), (99, "")],
)  # fmt: skip
def test_the_innermost_function_of_a_line(line: int, name: str) -> None:
    assert function_at(SOURCE, line) == name


def test_compiled_functions_have_no_probe() -> None:
    assert [line for line in range(35) if is_compiled(SOURCE, line)] == [23, 24]
    text = with_probes("m.py", SOURCE)
    assert text.count("hit(") == 4
    compile(text, "m.py", "exec")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sample.py").write_text(
        with_probes("sample.py", SOURCE).replace("@njit(cache=True)\n", "")
    )
    (tmp_path / "test_a.py").write_text(TESTS)
    (tmp_path / "test_b.py").write_text("from sample import one\n\ndef test_b():\n    one()\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    shutil.copy(relevant_tests.__file__, tmp_path / f"{PLUGIN}.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def _pytest(folder: Path, **variables: str) -> str:
    done = _run(folder, **variables)
    assert done.returncode == 0, done.stdout
    return done.stdout


def _run(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-v", "-p", PLUGIN, "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, "-p", "no:xdist"],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def test_tests_of_a_function_are_recorded_and_run_in_order(folder: Path) -> None:
    _pytest(folder, **{RECORD: str(folder / "record")})
    relevant = relevant_tests.read_record(folder / "record")
    used = {
        test.partition("::")[2]: sorted(p.partition("::")[2] for p in probes)
        for test, probes in relevant.probes.items()
    }
    outer = ["inner:13", "outer:7"]
    assert used == {
        "test_fixture": outer,
        "test_uses_the_same_fixture": outer,
        "test_own": ["one:19"],
        "test_child": ["method:30"],
        "test_nothing": [],
        "test_b": ["one:19"],
    }
    chosen, count = relevant.order("sample.py::outer:7", 100.0)
    assert chosen == ["test_a.py::test_fixture", "test_a.py::test_uses_the_same_fixture"]
    assert count == 2
    assert relevant.order("sample.py::outer:7", 0.2) == (chosen[:1], 2)
    assert relevant.order("sample.py::never:1", 100.0) == ([], 0)
    everything, _ = relevant.order("sample.py::", 100.0)
    assert set(everything) == set(relevant.seconds)
    assert everything[-1] == "test_a.py::test_nothing"
    limits = dict.fromkeys(reversed(chosen), 60)
    (folder / "order").write_text(json.dumps(limits))
    output = _pytest(folder, **{ORDER: str(folder / "order")})
    ran = [line.split()[0] for line in output.splitlines() if " PASSED" in line]
    assert ran == chosen[::-1]
    (folder / "order").write_text(json.dumps({**limits, chosen[1]: 1}))
    (folder / "test_a.py").write_text(TESTS.replace("time.sleep(0.3)", "time.sleep(60)"))
    assert _run(folder, **{ORDER: str(folder / "order")}).returncode == -signal.SIGALRM


def test_a_record_of_a_test_that_runs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "record"
    path.write_text(json.dumps(["t.py::t", 0.5, []]) + "\n")
    assert relevant_tests.read_record(path).order("m.py::", 1.0) == (["t.py::t"], 1)
