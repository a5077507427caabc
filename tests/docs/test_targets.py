"""Each target of the Makefile works from a clean clone, and has a job of its own in CI."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTALLED_FOR_DOCS = ("triton", "dev", "docs")
"""The extras that `make docs` installs, and nothing else, in a clean clone."""


def imported_packages() -> set[str]:
    """Third-party packages that a module of nostall imports."""
    names: set[str] = set()
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names) - {"nostall"}


def with_requirements(distributions: list[str]) -> set[str]:
    """The distributions and what they require, without optional parts."""
    found: set[str] = set()
    waiting = list(distributions)
    while waiting:
        name = re.split(r"[^\w.-]", waiting.pop().lower().replace("_", "-"))[0]
        if name in found:
            continue
        found.add(name)
        try:
            waiting += [text for text in requires(name) or () if "extra ==" not in text]
        except PackageNotFoundError:
            continue
    return found


def assigned(file: Path, name: str) -> list[str]:
    """A list of strings that a Python file assigns to a name."""
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            value: list[str] = ast.literal_eval(node.value)
            return value
    raise AssertionError(f"{file} does not assign {name}")


def test_the_documentation_imports_only_what_its_target_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = [*project["dependencies"], *(n for e in INSTALLED_FOR_DOCS for n in extras[e])]
    installed = with_requirements(named)
    mocked = assigned(ROOT / "docs" / "conf.py", "autodoc_mock_imports")
    distributions = packages_distributions()
    missing = {
        package
        for package in imported_packages() - set(mocked)
        if not installed & {d.lower().replace("_", "-") for d in distributions.get(package, [])}
    }
    assert missing == set()


def targets() -> list[str]:
    """Targets of the Makefile that check something and need no GPU."""
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    # `test-vllm` downloads 3.5 GB.
    others = {"help", "venv", "format", "clean", "test-vllm"}
    return [target for target in phony[1].split() if target not in others]


@pytest.mark.parametrize("target", targets())
def test_a_target_has_a_job_of_its_own(target: str) -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    matrices = re.findall(r"^ +target: \[(.*)\]$", workflow, re.MULTILINE)
    assert target in {name.strip() for matrix in matrices for name in matrix.split(",")}
    commands = re.findall(r"^ +- run: make (.*)$", workflow, re.MULTILINE)
    assert set(commands) == {"${{ matrix.target }}"}
