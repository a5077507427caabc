"""End-to-end tests of ``nostall plan`` and ``nostall simulate``."""

from __future__ import annotations

import json
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.e2e.cli import EXAMPLES, error_line, nostall, nostall_here

CLUSTER = EXAMPLES / "clusters" / "dapple-a-2x8.toml"


def _graph(layers: int = 20, **changes: str) -> str:
    """Graph text of a chain; ``changes`` replace fields of layer 2, "" removes a field."""
    lines = []
    for i in range(1, layers + 1):
        fields = {
            "forward_compute_time": "2.0",
            "backward_compute_time": "4.0",
            "activation_size": "4e6",
            "parameter_size": "5e7",
        }
        if i == 2:
            fields |= changes
        text = ", ".join(f"{key}={value}" for key, value in fields.items() if value)
        lines.append(f"node{i} -- Layer{i} -- {text}")
    return "\n".join([*lines, *(f"\tnode{i} -- node{i + 1}" for i in range(1, layers))])


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "model-pbs-4.txt"
    path.write_text(_graph())
    return path


def test_a_plan_is_written_and_simulated_again(profile: Path, tmp_path: Path) -> None:
    plan, figure = tmp_path / "plan.json", tmp_path / "plan.svg"
    done = nostall(
        "plan", profile, "--cluster", CLUSTER, "--planner", "dapple", "--format", "json",
        "--out", plan, "--gantt", figure,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert list(done.json)[:3] == ["planner", "predicted_iteration_s", "predicted_speedup"]
    assert done.json["planner"] == "dapple"
    assert done.json["kind"] == "modelled"
    assert done.json["micro_batches"] == 32  # 128 samples, 4 per micro-batch
    assert 1 < done.json["predicted_speedup"] < 16
    assert done.json["fits"] == "unknown"
    assert json.loads(plan.read_text()) == done.json
    bars = [e for e in ET.parse(figure).iter() if e.tag.endswith("title")]
    assert len(bars) >= 2 * 32
    again = nostall_here("simulate", plan, "--format", "json")
    assert again.json == done.json
    slower = nostall_here("simulate", plan, "--policy", "gpipe", "--format", "json")
    assert slower.json["predicted_iteration_s"] >= done.json["predicted_iteration_s"]


def test_the_table_states_that_times_are_modelled_and_memory_is_a_bound(
    profile: Path, tmp_path: Path
) -> None:
    page = tmp_path / "plan.html"
    done = nostall_here("plan", profile, "--cluster", CLUSTER, "--seconds", 1, "--gantt", page)
    assert done.code == 0, done.err
    assert "modelled iteration" in done.out and "modelled speed-up" in done.out
    assert "memory is a lower bound" in done.out
    text = page.read_text()
    assert text.startswith("<!doctype html>") and "all times on this page are modelled" in text
    assert "memory is a lower bound" in text and "<th>stage</th>" in text and "<svg" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward_compute_time": "-1"}, "forward_compute_time=-1"),
        ({"backward_compute_time": ""}, "backward_compute_time is missing"),
        ({"parameter_size": "1e13"}, "memory"),
    ],
)
def test_invalid_profiles_end_with_one_line(
    tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    path = tmp_path / "bad-pbs-4.txt"
    path.write_text(_graph(**changes))
    assert message in error_line(
        nostall_here("plan", path, "--cluster", CLUSTER, "--planner", "dapple")
    )


def test_other_invalid_input_ends_with_one_line(profile: Path, tmp_path: Path) -> None:
    unconnected = tmp_path / "unconnected.toml"
    unconnected.write_text('name = "unconnected"\n[[servers]]\ngpus = 2\nmemory_gib = 16\n')
    assert "cannot reach" in error_line(nostall_here("plan", profile, "--cluster", unconnected))
    cyclic = tmp_path / "cyclic-pbs-4.txt"
    cyclic.write_text(_graph() + "\n\tnode9 -- node3")
    assert "cycle" in error_line(nostall_here("plan", cyclic, "--cluster", CLUSTER))
    short = tmp_path / "short-pbs-4.txt"
    short.write_text(_graph(3))
    too_few_layers = nostall_here("plan", short, "--cluster", CLUSTER, "--planner", "even")
    assert "needs 16 stages and the profile has 3 layers" in error_line(too_few_layers)
    without_batch = tmp_path / "model.txt"
    without_batch.write_text(_graph())
    assert "--micro-batch" in error_line(nostall_here("plan", without_batch, "--cluster", CLUSTER))
    unknown = nostall_here("plan", profile, "--cluster", CLUSTER, "--planner", "alpa")
    assert "allowed are nostall, dapple" in error_line(unknown)
    extension = nostall_here(
        "plan", profile, "--cluster", CLUSTER, "--planner", "gpipe", "--gantt", tmp_path / "g.png"
    )
    assert ".svg and .html" in error_line(extension)
    assert "cannot read" in error_line(nostall_here("simulate", tmp_path / "none.json"))
    empty = tmp_path / "empty.json"
    empty.write_text("{}")
    assert "planner" in error_line(nostall_here("simulate", empty))


def test_options_that_have_no_effect_are_refused(profile: Path, tmp_path: Path) -> None:
    plan = ["plan", profile, "--cluster", CLUSTER]
    for options, message in (
        (["--planner", "even", "--seed", 3], "--seed is an option of the planner nostall"),
        (["--planner", "spp", "--evaluations", 9], "--evaluations is an option of the planner"),
        (["--layers", "leaf"], "--layers says how a module is measured"),
        (["--device", "cpu"], "--device says how a module is measured"),
        (["--gpu-memory", 8], "--gpu-memory is for the output of nvidia-smi"),
        (["--planner", "dappel"], "did you mean 'dapple'?"),
    ):
        assert message in error_line(nostall_here(*plan, *options))


def test_the_time_limit_of_planning_is_kept_and_said(profile: Path) -> None:
    plan = ["plan", profile, "--cluster", CLUSTER, "--quiet", "--format", "json"]
    assert nostall_here(*plan, "--seconds", 0.1).code == 0  # compiles the simulator
    start = time.monotonic()
    done = nostall_here(*plan, "--seconds", 0.2)
    assert done.code == 0 and time.monotonic() - start < 5
    assert "the time limit of 0.2 s ended the planning" in done.err
    start = time.monotonic()
    line = error_line(nostall_here(*plan, "--global-batch", 1_000_000_000, "--seconds", 5))
    assert "--micro-batch" in line and time.monotonic() - start < 5
    line = error_line(nostall_here(*plan, "--global-batch", 800_000, "--seconds", 5))
    assert "one simulation of" in line


def test_a_plan_file_with_a_huge_number_is_one_line(profile: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    planned = nostall_here("plan", profile, "--cluster", CLUSTER, "--planner", "spp", "--out", path)
    assert planned.code == 0
    document = json.loads(path.read_text())
    for key in ("global_batch", "micro_batch"):
        changed = {**document, "inputs": {**document["inputs"], key: 10**350}}
        (tmp_path / "huge.json").write_text(json.dumps(changed))
        assert "allowed are up to" in error_line(nostall_here("simulate", tmp_path / "huge.json"))
