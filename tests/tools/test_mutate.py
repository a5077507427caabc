"""Mutation of a package in a clone: the mutations, the sample, and the table."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tools.mutations import Mutation, mutations, sample

from tools import mutate

SOURCE = '''"""A module; 3 + 4 here is text."""
from __future__ import annotations

LIMIT: int | None = 3


def bounded(x: int, low: int = 0, *, high: int | None = None) -> int:
    """The nearest allowed number."""
    if high is None and x > LIMIT:
        raise ValueError(f"{x + 1} is above {LIMIT}")
    assert x < 99
    return min(max(x, low), high or x)
'''


def _changes(source: str) -> set[tuple[str, str]]:
    """(operator, text of the module with the mutation) without the lines that are equal."""
    lines = source.splitlines()
    changed = set()
    for mutation in mutations("m.py", source):
        new = mutation.apply(source).splitlines()
        pairs = zip(lines, new, strict=False)
        changed.add((mutation.operator, next(b.strip() for a, b in pairs if a != b)))
    return changed


def test_mutations_change_conditions_constants_calls_and_statements() -> None:
    changes = _changes(SOURCE)
    assert changes >= {
        ("constant", "LIMIT: int | None = 4"),
        ("constant", "def bounded(x: int, low: int = 1, *, high: int | None = None) -> int:"),
        ("comparison", "if high is None and x >= LIMIT:"),
        ("comparison", "if high is None and x <= LIMIT:"),
        ("comparison", "if high is not None and x > LIMIT:"),
        ("boolean", "if high is None or x > LIMIT:"),
        ("operand removed", "if (x > LIMIT):"),
        ("condition", "if (not (high is None and x > LIMIT)):"),
        ("statement removed", "pass"),
        ("call", "return max(max(x, low), high or x)"),
        ("operand removed", "return min(max(x, low), (x))"),
    }
    text = "\n".join(line for _, line in changes)
    assert "3 - 4" not in text and "x - 1" not in text and "99" not in text
    assert "int & None" not in text


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x += 1", {"x -= 1", "pass", "x += 2", "x += 0"}),
        ("f(1.5, key=y)", {"f(1.5)", "f(3.0, key=y)", "pass"}),
        ("t = a if b else c", {"t = (a)", "t = (c)"}),
        ("t = [i for i in r if i]", {"t = [i for i in r if True]"}),
        ("t = a * b // c", {"t = a / b // c", "t = a * b * c"}),
        ("t = not a", {"t = (a)"}),
        ("t = A | B", {"t = A & B"}),
        ("ok = isinstance(a, list | Tuple)", set()),
        ("t = 'a' + b", set()),
        ("é = 1; t = a <= b", {"é = 2; t = a <= b", "é = 0; t = a <= b"}
         | {f"é = 1; t = a {sign} b" for sign in ("<", ">")}),
    ],
)  # fmt: skip
def test_mutations_of_one_line(line: str, expected: set[str]) -> None:
    assert {new for _, new in _changes(f"{line}\n")} == expected


def test_a_smaller_sample_is_the_beginning_of_a_larger_one() -> None:
    root = mutate.ROOT
    folder = root / "src" / "nostall" / "store"
    large, total = sample(root, folder, 30, seed=0)
    small, _ = sample(root, folder, 10, seed=0)
    assert large[:10] == small
    assert total > 300 and len(set(large)) == 30
    assert sample(root, folder, 10, seed=1)[0] != small


PACKAGE = '''"""A countdown."""


def steps(n):
    """How many halves of n are above 0."""
    found = n - n
    while n:
        n //= 2
        found += 1
    return found


def unused(x):
    """Nothing tests it."""
    return x == x
'''
TESTS = """from nostall.sums import steps


def test_steps():
    assert steps(5) == 3
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one small package, of which one function has tests."""
    root = tmp_path / "repository"
    files = {
        "src/nostall/__init__.py": "",
        "src/nostall/sums/__init__.py": PACKAGE,
        "tests/unit/sums/test_sums.py": TESTS,
        "pytest.ini": "[pytest]\nmarkers =\n  slow: x\n  gpu: x\n",
        ".gitignore": "tools\n.cache\n",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "x"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    monkeypatch.setattr(mutate, "SLACK_SECONDS", 2.0)
    monkeypatch.setattr(mutate, "SLACK_FACTOR", 2)
    return root


def _table(root: Path) -> dict[str, Any]:
    table: dict[str, Any] = json.loads((root / "tools/mutants/sums.json").read_text())
    return table


@pytest.mark.slow
def test_mutations_are_killed_survive_or_hang_in_the_clone(repository: Path) -> None:
    before = {p: p.read_bytes() for p in (repository / "src").rglob("*.py")}
    assert mutate.main(["sums"], root=repository) == 0
    assert {p: p.read_bytes() for p in (repository / "src").rglob("*.py")} == before
    table = _table(repository)
    rows = {(row["old"], row["new"]): row["outcome"] for row in table["mutants"]}
    assert len(table["mutants"]) == table["done"] == table["mutations"]
    assert rows["==", "!="] == "survived"
    assert rows["found += 1", "pass"] == rows["-", "+"] == "killed"
    assert rows["n //= 2", "pass"] == rows["2", "1"] == "timeout"


def test_a_table_is_continued_and_survivors_run_again(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs: list[Mutation | None] = []
    outcome = "survived"

    def run(_: mutate.Clone, seconds: float, mutation: Mutation | None = None) -> tuple[str, str]:
        assert seconds >= 2
        runs.append(mutation)
        return ("survived" if mutation is None or mutation.operator == "constant" else outcome), ""

    monkeypatch.setattr(mutate.Clone, "run", run)
    assert mutate.main(["sums", "--count", "3"], root=repository) == 0
    outcome = "killed"
    assert mutate.main(["sums", "--count", "99", "--resume"], root=repository) == 0
    table = _table(repository)
    assert table["done"] == table["mutations"] == len({m for m in runs if m is not None})
    assert [row["outcome"] for row in table["mutants"]][:3] == ["survived"] * 3
    explained = repository / "tools/mutants/sums.json"
    explained.write_text(
        explained.read_text().replace('"number": 1,', '"number": 1, "explanation": "e",')
    )
    survivors = table["outcomes"]["survived"]
    del runs[:]
    assert mutate.main(["sums", "--count", "99", "--survivors"], root=repository) == 0
    assert len(runs) == 1 + survivors  # the unchanged tests run first
    constants = [m for m in runs if m is not None and m.operator == "constant"]
    assert _table(repository)["outcomes"].get("survived", 0) == len(constants)
    with pytest.raises(SystemExit):
        mutate.main(["sums"], root=repository)
    assert "give --resume" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        mutate.main(["sums", "--resume", "--seed", "7"], root=repository)


def test_an_interrupt_keeps_what_was_found(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def interrupted(*arguments: object) -> tuple[str, str]:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return "survived", ""

    monkeypatch.setattr(mutate.Clone, "run", interrupted)
    assert mutate.main(["sums"], root=repository) == 130
    assert _table(repository)["done"] == 1
    assert "--resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "edit", "message"),
    [
        ("nothing", "", "does not exist; give a package"),
        ("sums", "src/nostall/sums/__init__.py", "is not committed"),
        ("sums", "tests/unit/sums/test_sums.py", "is not committed"),
    ],
)
def test_what_cannot_be_measured(
    repository: Path, package: str, edit: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if edit:
        (repository / edit).write_text("x = 1\n")
    assert mutate.main([package], root=repository) == 3
    assert message in capsys.readouterr().err


def test_failing_tests_of_the_unchanged_package_are_an_error(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "tests/unit/sums/test_sums.py").write_text("def test_wrong():\n    assert 0\n")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, "commit", "-qam", "wrong"], cwd=repository, check=True)
    assert mutate.main(["sums"], root=repository) == 3
    assert "test_wrong" in capsys.readouterr().err


@pytest.mark.parametrize(
    "path", sorted((mutate.ROOT / "tools/mutants").glob("*.json")), ids=lambda path: path.stem
)
def test_committed_tables_explain_their_survivors(path: Path) -> None:
    table = json.loads(path.read_text())
    rows = table["mutants"]
    assert [row["number"] for row in rows] == list(range(1, len(rows) + 1))
    assert table["done"] == len(rows) <= table["sample"]
    unexplained = [row["line"] for row in rows if row["outcome"] != "killed"]
    assert unexplained == [row["line"] for row in rows if row.get("explanation")]


def test_compiled_modules_and_what_they_import_get_a_cache_of_their_own() -> None:
    files = mutate._compiled_files(mutate.ROOT)
    assert "src/nostall/parallel/simulate/engine.py" in files
    assert "src/nostall/parallel/planners/closed_form.py" in files
    assert "src/nostall/store/store.py" not in files
