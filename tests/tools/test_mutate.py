"""Mutation of a package in a clone: the mutations, the sample, and the table."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tools.mutation_table import summary
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
    assert list(large.items())[:10] == list(small.items())
    assert total > 300 and len(set(large.values())) == 30
    assert set(sample(root, folder, 10, seed=1)[0]) != set(small)


def test_names_stay_when_other_lines_change(tmp_path: Path) -> None:
    file = tmp_path / "m.py"
    names = []
    for text in ("def f(x):\n    return x + 1\n", "Y = 0\ndef f(x):\n  if Y:\n    return x + 1\n"):
        file.write_text(text)
        found, _ = sample(tmp_path, file, 99, seed=0)
        names.append(
            {name: m.new for name, m in found.items() if m.apply(text).count("x + 1") == 0}
        )
    assert names[0] == names[1] and len(names[0]) == 3
    twice = "x += 1\nx += 1\n"
    file.write_text(twice)
    assert len(sample(tmp_path, file, 99, seed=0)[0]) == len(mutations("m.py", twice))


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


def _commit(root: Path) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["add", "."], [*identity, "commit", "-qm", "x"]):
        subprocess.run(["git", *command], cwd=root, check=True)


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
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    _commit(root)
    monkeypatch.setattr(mutate, "SLACK_SECONDS", 8.0)
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
    runs: list[Mutation] = []
    outcome = "survived"

    def run(_: mutate.Clone, mutation: Mutation, tests: dict[str, int]) -> tuple[str, str]:
        assert all(limit >= 8 for limit in tests.values())
        runs.append(mutation)
        return ("survived" if mutation.operator == "constant" else outcome), ""

    monkeypatch.setattr(mutate.Clone, "run", run)
    assert mutate.main(["sums", "--count", "3"], root=repository) == 0
    outcome = "killed"
    assert mutate.main(["sums", "--count", "99", "--resume"], root=repository) == 0
    table = _table(repository)
    assert table["done"] == table["mutations"] == len(set(runs))
    assert [row["outcome"] for row in table["mutants"]][:3] == ["survived"] * 3
    explained = repository / "tools/mutants/sums.json"
    first = table["mutants"][0]
    explained.write_text(explained.read_text().replace('{"name"', '{"explanation": "e", "name"', 1))
    survivors = table["outcomes"]["survived"]
    del runs[:]
    assert mutate.main(["sums", "--count", "99", "--survivors"], root=repository) == 0
    assert len(runs) == survivors
    constants = [m for m in runs if m.operator == "constant"]
    table = _table(repository)
    assert table["outcomes"].get("survived", 0) == len(constants)
    assert ("explanation" in table["mutants"][0]) == (first["operator"] == "constant")
    assert mutate.main(["sums"], root=repository) == 3
    assert "give --resume" in capsys.readouterr().err
    assert mutate.main(["sums", "--resume", "--seed", "7"], root=repository) == 3
    assert "give --seed 0" in capsys.readouterr().err


def test_an_interrupt_keeps_what_was_found(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def interrupted(*arguments: object) -> tuple[str, str]:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return "survived", ""

    monkeypatch.setattr(mutate.Clone, "run", interrupted)
    assert mutate.main(["sums"], root=repository) == 130
    assert _table(repository)["done"] == 1
    assert "--resume" in capsys.readouterr().err


def test_rows_of_removed_source_leave_the_table(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutate.Clone, "run", lambda *_: ("survived", ""))
    assert mutate.main(["sums", "--count", "99"], root=repository) == 0
    before = {row["name"] for row in _table(repository)["mutants"]}
    source = repository / "src/nostall/sums/__init__.py"
    source.write_text(source.read_text().partition("\n\n\ndef unused")[0] + "\n")
    _commit(repository)
    assert mutate.main(["sums", "--count", "99", "--resume"], root=repository) == 0
    assert {row["name"] for row in _table(repository)["mutants"]} < before


def test_survivors_run_with_chosen_tests(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of another folder kills what it can, and changes no other row."""
    monkeypatch.setattr(mutate.Clone, "run", lambda *_: ("survived", ""))
    assert mutate.main(["sums", "--count", "99"], root=repository) == 0
    before = _table(repository)
    monkeypatch.undo()
    other = repository / "tests/unit/test_other.py"
    other.write_text("from nostall.sums import unused\n\ndef test():\n    assert unused(1)\n")
    _commit(repository)
    chosen = ["--survivors", "--tests", "tests/unit/test_other.py"]
    assert mutate.main(["sums", "--count", "99", *chosen], root=repository) == 0
    after = _table(repository)
    changed = [b for a, b in zip(before["mutants"], after["mutants"], strict=True) if a != b]
    assert [(row["old"], row["outcome"]) for row in changed] == [("==", "killed")]
    assert changed[0]["failed"] == "tests/unit/test_other.py::test"
    assert after["tests"] == before["tests"]


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
    _commit(repository)
    assert mutate.main(["sums"], root=repository) == 3
    assert "test_wrong" in capsys.readouterr().err


@pytest.mark.parametrize(
    "path", sorted((mutate.ROOT / "tools/mutants").glob("*.json")), ids=lambda path: path.stem
)
def test_committed_tables_explain_their_survivors(path: Path) -> None:
    table = json.loads(path.read_text())
    rows = table["mutants"]
    assert [row["name"] for row in rows] == sorted(row["name"] for row in rows)
    assert table["done"] == len(rows) <= table["sample"]
    unexplained = [
        f"{row['file']}:{row['line']}"
        for row in rows
        if row["outcome"] != "killed" and not row.get("explanation")
    ]
    assert unexplained == []


def test_the_documented_summary_is_that_of_the_tables() -> None:
    assert (
        summary(mutate.ROOT / "tools" / "mutants")
        in (mutate.ROOT / "tools" / "README.md").read_text()
    )


def test_compiled_modules_and_what_they_import_get_a_cache_of_their_own() -> None:
    files = mutate._compiled_files(mutate.ROOT)
    assert "src/nostall/parallel/simulate/engine.py" in files
    assert "src/nostall/parallel/planners/closed_form.py" in files
    assert "src/nostall/store/store.py" not in files
