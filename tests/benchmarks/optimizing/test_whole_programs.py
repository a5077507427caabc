"""Programs that take turns, their ratios, and the split of programs."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.harness.result_file import load, results
from benchmarks.optimizing.taking_turns import Turns
from benchmarks.optimizing.whole_programs import (
    AS_WRITTEN,
    BEST,
    BUNDLE,
    FOLDER,
    NULL,
    best_of,
    programs,
    ratios,
)

LOOP = (
    "import time\nfor n in range(10**6): time.sleep({seconds}); print(f'step {{n}} x', flush=True)"
)
SCRIPTS = sorted(FOLDER.glob("*.py"))
COMPILED = ("lstm_lm", "small_layers")


def command(seconds: float) -> list[str]:
    return [sys.executable, "-c", LOOP.format(seconds=seconds)]


def test_the_halves_are_of_different_programs() -> None:
    developed, held_out = programs("developed"), programs("held_out")
    assert len(developed) >= 6 and len(held_out) >= 6 and len({*developed, *held_out}) >= 12
    assert not set(developed) & set(held_out)
    assert {path.stem for path in SCRIPTS} <= set(programs())


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_program_does_not_know_nostall(path: Path) -> None:
    """Plain scripts, as users write them."""
    text = path.read_text()
    imported = {
        name.name.partition(".")[0]
        for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import)
        for name in node.names
    }  # fmt: skip
    assert "nostall" not in text and imported <= {"argparse", "math", "tempfile", "torch", "triton"}
    assert all(f'"--{option}"' in text for option in ("steps", "best", "tiny"))


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--best", "graphs"]], ids=" ".join)
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_program_prints_its_steps(path: Path, options: list[str]) -> None:
    """Graphs are the default mode and more. Inductor's code for CPUs, which takes longest, is only
    made of two programs: a benchmark runs them all on a GPU."""
    pytest.importorskip("torch")
    if path.stem == "triton_kernels":
        pytest.skip("it needs a GPU")
    if path.stem == "llama_trainer":
        pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, str(path), "--tiny", "--steps", "20", *options],
        env={**os.environ, "TORCH_COMPILE_DISABLE": str(int(path.stem not in COMPILED))},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1].startswith("step 20 ")


def test_programs_take_turns(tmp_path: Path) -> None:
    with Turns(dict(os.environ), tmp_path, time.perf_counter() + 60) as turns:
        turns.add("slow", command(0.02))
        turns.add("fast", command(0.01))
        turns.add("broken", [sys.executable, "-c", "1/0"])
        samples = turns.samples(3)
    assert list(turns.failures) == ["broken"]
    assert "ZeroDivisionError" in turns.failures["broken"]
    assert turns.starts.keys() == samples.keys() == {"slow", "fast"}
    assert all(len(times) == 3 for times in samples.values())
    for slow, fast in zip(samples["slow"], samples["fast"], strict=True):
        assert slow >= 0.02 and 0.01 <= fast < slow  # the pauses are not in them


def test_incomplete_rounds_are_left_out(tmp_path: Path) -> None:
    begin = time.perf_counter()
    with Turns(dict(os.environ), tmp_path, begin + 4) as turns:
        for name in ("one", "two"):
            turns.add(name, command(0.05))
        samples = turns.samples(100)
    assert time.perf_counter() - begin < 10
    assert len(samples["one"]) == len(samples["two"]) < 100


def test_the_measured_ratios_follow_from_their_samples() -> None:
    files = ("programs_h200.json", "programs_h200_first.json")
    contents = [load(results("optimizing") / file) for file in files]
    for row in (row for content in contents for row in content["programs"].values()):
        found = ratios(row["step_seconds"])
        assert found.keys() == row["ratios"].keys()
        for name, ratio in found.items():
            assert ratio["ratio"] == pytest.approx(row["ratios"][name]["ratio"])
            assert ratio["interval"] == pytest.approx(row["ratios"][name]["interval"])


def test_ratios_are_of_those_that_ran() -> None:
    default, graphs = f"{BEST}, default", f"{BEST}, graphs"
    samples = {AS_WRITTEN: [2.0, 2.1, 2.0], NULL: [2.0, 2.0, 2.1], default: [1.0, 1.0, 1.1]}
    found = ratios(samples)
    assert found.keys() == {f"{AS_WRITTEN} / {arm}" for arm in (default, BEST)}
    assert found[f"{AS_WRITTEN} / {BEST}"]["ratio"] == pytest.approx(2.0, rel=0.1)
    found = ratios({**samples, BUNDLE: [0.5, 0.5, 0.5]})
    assert found[f"{BEST} / {BUNDLE}"]["ratio"] == pytest.approx(2.0)
    assert found[f"{AS_WRITTEN} / {BUNDLE}"]["null_interval"][0] <= 1.0
    assert best_of(samples) == "default"
    assert best_of({**samples, graphs: [0.9, 0.9, 1.2]}) == "graphs"
    assert best_of({AS_WRITTEN: [2.0, 2.1]}) is None
