"""The registry of benchmarks: modules, options, result files and pages exist."""

from __future__ import annotations

import ast
import json
from importlib.util import find_spec

import pytest
from benchmarks.__main__ import PAGES, main
from benchmarks.registry import BENCHMARKS, ROOT, Benchmark


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: benchmark.name)
def test_a_benchmark_has_options_and_a_main(benchmark: Benchmark) -> None:
    """Parses the modules, because some import optional packages."""
    source = ROOT / f"{benchmark.module.replace('.', '/')}.py"
    names = {node.name for node in ast.parse(source.read_text()).body
             if isinstance(node, ast.FunctionDef)}  # fmt: skip
    imported = {
        alias.name
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {"add_options", "main"} <= names | imported
    assert [result for result in benchmark.results if not (ROOT / result).exists()] == []


def test_names_are_unique_and_questions_end_with_a_mark() -> None:
    names = [benchmark.name for benchmark in BENCHMARKS]
    assert len(set(names)) == len(names)
    assert all(benchmark.question.endswith("?") for benchmark in BENCHMARKS)


def test_every_result_file_belongs_to_a_benchmark() -> None:
    """Other files are output of a command of nostall; benchmarks/README.md lists them."""
    named = {result for benchmark in BENCHMARKS for result in benchmark.results}
    others = {"sass/results/assemblers.json", "sass/results/seeded_hazards.json",
              "fusion/results/layernorm_gelu.json", "fusion/results/layernorm_gelu_h200.json",
              "learning/results/on_gpu.json.gz"}  # fmt: skip
    present = {str(path.relative_to(ROOT)) for path in ROOT.glob("*/results/*")}
    assert present == named | others


def test_pages_are_modules() -> None:
    assert all(find_spec(f"benchmarks.{module}") for module in PAGES.values())
    elsewhere = ("readme", "schema", "verifier-evidence", "explanation", "demo")
    pages = {f"{name}.md" for name in PAGES if name not in elsewhere}
    assert {benchmark.page for benchmark in BENCHMARKS if benchmark.page} == pages


def test_the_list_is_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--format", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(BENCHMARKS)
