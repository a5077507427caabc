"""The level of a program's own Triton kernels, from launches to `apply --bundle`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cli import ROOT, Done, nostall
from tests.unit.attach.variants import GPU

pytest.importorskip("torch")
pytest.importorskip("triton")

PROGRAM = Path(__file__).with_name("triton_program.py")
STEP = "tests.unit.attach.program.triton_step:step"
SEARCHES = "tests.unit.attach.program.triton_step"


def run(folder: Path, *words: object, search: str = "store_variant", **variables: str) -> Done:
    variables = {
        "NOSTALL_GPU": GPU, "NOSTALL_HOME": str(folder / "store"), "FASTER": str(folder / "faster"),
        "TRITON_CACHE_DIR": str(folder / "cache"), "SEARCH": f"{SEARCHES}:{search}",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", **variables,
    }  # fmt: skip
    return nostall(*words, cwd=folder, **variables)


def optimize(folder: Path, *options: str, **variables: str) -> tuple[Done, Any]:
    done = run(
        folder, "optimize", *options, "--step", STEP, "--minutes", "6", "--format", "json", "--",
        sys.executable, PROGRAM, **variables,
    )  # fmt: skip
    assert done.code == 0, done.err
    return done, json.loads(done.out)


@pytest.fixture(scope="module")
def optimized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("program")
    return folder, optimize(folder)[1]


def test_kernels_are_searched_and_kept_with_the_whole_step(optimized: tuple[Path, Any]) -> None:
    _, document = optimized
    assert document["watched"]["kernels"] == [{"kernel": "axpy", "launches": 1.0}]
    (attempt,) = document["attempts"]
    assert attempt["change"] == {"name": "native kernels", "kind": "native", "value": "store"}
    assert (attempt["outcome"], attempt["class"]) == ("kept", "bit-equal"), attempt["reason"]
    (kernel,) = attempt["kernels"]
    assert kernel["launches"] == 1 and kernel["seconds"] == 5e-3 and kernel["record"]
    assert 1.4 < document["together"]["ratio"] < 1.8
    assert "kernels alone: axpy" in attempt["reason"]
    assert document["lines"] == ["@nostall.optimize  # above @triton.jit of axpy"]
