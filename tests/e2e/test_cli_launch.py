"""End-to-end tests of ``nostall plan module.py:build`` and ``nostall launch`` on gloo."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.cli import ROOT, command, environment, error_line, nostall
from tests.e2e.sockets import listening

pytestmark = pytest.mark.slow

pytest.importorskip("torch", reason="running plans needs the extra nostall[torch]")

JOBS = ROOT / "tests" / "unit" / "parallel" / "jobs.py"
CLUSTER = """
name = "two"
[[servers]]
gpus = 2
memory_gib = 4
link = { bandwidth_gbytes = 10, latency_us = 10 }
"""
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plan file of an even split of the chain over two processes."""
    folder = tmp_path_factory.mktemp("launch")
    (folder / "two.toml").write_text(CLUSTER)
    path = folder / "plan.json"
    done = nostall(
        "plan", f"{JOBS}:chain", "--cluster", folder / "two.toml", "--planner", "even",
        "--global-batch", 8, "--micro-batch", 2, "--device", "cpu", "--format", "json",
        "--out", path, **ENVIRONMENT,
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.json["module"] == f"{JOBS}:chain"
    assert done.json["fits"] == "yes"  # stored bytes were measured
    return path


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_a_module_of_another_user_that_a_plan_names_elsewhere_is_not_imported(
    planned: Path, tmp_path: Path
) -> None:
    elsewhere, mine = tmp_path / "elsewhere", tmp_path / "mine"
    for folder in (elsewhere, mine):
        folder.mkdir()
    (elsewhere / "evil.py").write_text(
        "from pathlib import Path\nPath(__file__ + '.ran').touch()\n"
    )
    os.chown(elsewhere / "evil.py", 12345, 12345)
    target = f"{elsewhere / 'evil.py'}:build"
    document = json.loads(planned.read_text()) | {"module": target}
    (mine / "plan.json").write_text(json.dumps(document))
    line = error_line(nostall("launch", mine / "plan.json", cwd=mine))
    assert line.endswith(f"if you trust it, give --module {target}")
    assert not (elsewhere / "evil.py.ran").exists()
    (mine / "link.py").symlink_to(elsewhere / "evil.py")
    (mine / "plan.json").write_text(json.dumps(document | {"module": f"{mine / 'link.py'}:build"}))
    assert "if you trust it" in error_line(nostall("launch", mine / "plan.json", cwd=mine))


def test_a_module_of_ones_own_that_a_plan_names_elsewhere_is_named_and_imported(
    planned: Path, tmp_path: Path
) -> None:
    done = nostall("launch", planned, "--steps", 1, "--device", "cpu", cwd=tmp_path, **ENVIRONMENT)
    assert done.code == 0, done.err
    assert f"imports {JOBS}:chain, which {planned} names" in done.err


def test_a_planned_module_is_run_and_checked(planned: Path) -> None:
    done = nostall(
        "launch",
        planned,
        "--steps",
        3,
        "--device",
        "cpu",
        "--check",
        "--format",
        "json",
        **ENVIRONMENT,
    )
    assert done.code == 0, done.err
    assert f"imports {JOBS}:chain, which {planned} names" in done.err
    result = done.json
    assert result["engine"] == "torch"
    assert result["losses"] == pytest.approx(result["reference_losses"], rel=1e-9)
    assert result["worst_gradient"] <= 1 and result["worst_loss"] <= 1
    assert result["equal"] is True
    assert result["measured_iteration_s"] > 0 and result["predicted_iteration_s"] > 0


def test_another_loss_than_in_one_process_is_reported(planned: Path) -> None:
    """A standard deviation over the batch is not a mean over its samples."""
    done = nostall(
        "launch", planned, "--module", f"{JOBS}:batch_statistics_loss", "--steps", 1,
        "--device", "cpu", "--check", "--format", "json", **ENVIRONMENT,
    )  # fmt: skip
    assert done.code == 1, done.err
    assert done.json["equal"] is False and done.json["worst_loss"] > 1


def test_an_abort_at_finalization_does_not_fail_the_run(planned: Path, tmp_path: Path) -> None:
    done = nostall(
        "launch", planned, "--module", f"{JOBS}:aborts_at_finalization", "--steps", 1,
        "--device", "cpu", "--logs", tmp_path, "--format", "json", **ENVIRONMENT,
    )  # fmt: skip
    assert done.code == 0, done.err
    printed = [path.read_text() for path in tmp_path.rglob("stdout.log")]
    assert printed == ["from the thread\nfrom the exit handler\n"] * 2


def test_a_killed_rank_ends_the_run_with_one_line(planned: Path, tmp_path: Path) -> None:
    start = time.monotonic()
    done = nostall(
        "launch", planned, "--module", f"{JOBS}:killed_in_step_2", "--steps", 5, "--device", "cpu",
        "--deadline", 60, "--logs", tmp_path, **ENVIRONMENT,
    )  # fmt: skip
    message = error_line(done, 3)
    assert "rank 1 was killed by SIGKILL" in message and str(tmp_path) in message
    assert time.monotonic() - start < 55  # detected at once, not by the deadline


def test_plans_that_cannot_be_run_end_with_one_line(planned: Path, tmp_path: Path) -> None:
    no_file = nostall("launch", planned, "--module", tmp_path / "none.py:build")
    assert "an existing file" in error_line(no_file)
    record = json.loads(planned.read_text())
    without_module = tmp_path / "plan.json"
    without_module.write_text(json.dumps(record | {"module": None}))
    assert "names no module" in error_line(nostall("launch", without_module))
    assert "--endpoint" in error_line(nostall("launch", planned, "--nodes", 2))


def test_a_run_on_one_machine_listens_on_the_loopback_interface_only(
    planned: Path, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        command("launch", planned, "--steps", 100_000, "--device", "cpu", "--logs", tmp_path),
        env=environment(**ENVIRONMENT),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        seen: dict[int, set[str]] = {}
        deadline = time.monotonic() + 60
        # The store of the agent, and at least one socket of each rank's process group.
        while time.monotonic() < deadline and len(seen) < 3:
            assert process.poll() is None
            for pid, address in listening(process.pid):
                seen.setdefault(pid, set()).add(address)
            time.sleep(0.1)
        assert len(seen) == 3, seen
        for addresses in seen.values():
            assert addresses == {"127.0.0.1"}, seen
    finally:
        process.terminate()
        process.wait(60)


def test_an_endpoint_needs_several_machines(planned: Path) -> None:
    done = nostall("launch", planned, "--endpoint", "127.0.0.1:29500")
    assert "--nodes" in error_line(done)


def test_a_plan_is_exported_for_torchtitan(planned: Path, tmp_path: Path) -> None:
    done = nostall("simulate", planned, "--torchtitan", tmp_path)
    assert done.code == 0, done.err
    rows = (tmp_path / "schedule.csv").read_text().splitlines()
    assert rows == [
        "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3",
        "1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3",
    ]
    settings = json.loads((tmp_path / "torchtitan.json").read_text())["parallelism"]
    assert settings["module_fqns_per_model_part"] == [list("01234"), list("56789")]
    assert settings["pipeline_parallel_degree"] == 2
