"""Walks of legal moves end in schedules that the verifier accepts, with or without preparation."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from benchmarks.harness.result_file import save

from benchmarks.sass.distances import freed_slack
from benchmarks.sass.gpu_walks import prepare, random_walks_on_gpu, walks
from nostall.core.errors import BadInput
from nostall.sass import Program
from nostall.sass.schedule import ScheduleSpace

DOT_PRODUCT = Path(__file__).resolve().parents[4] / "examples" / "nvcc" / "dot_product.sm_90.cubin"
NAME = "dot_product.sm_90"


@pytest.fixture(scope="module")
def space() -> ScheduleSpace:
    program = Program.from_cubin(DOT_PRODUCT.read_bytes())
    return ScheduleSpace(program, program.kernel("dot_product"))


def test_a_walk_is_repeated_by_its_seed(space: ScheduleSpace) -> None:
    plain, tight = walks.tasks_of(NAME, walks=1, moves=15, seed=3)
    assert (plain.tighten, tight.tighten) == (False, True)
    end = walks.walk_to_end(space, tight)
    assert end == walks.walk_to_end(space, tight)
    assert end.cycles[1] <= end.cycles[0]


def options(tmp_path: Path, **changes: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    random_walks_on_gpu.add_options(parser)
    parsed = parser.parse_args(["--out", str(tmp_path / "out.json")])
    return argparse.Namespace(**{**vars(parsed), **changes})


def test_prepared_walks_must_be_safe_and_of_the_same_cubin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "original", lambda name: DOT_PRODUCT.read_bytes())
    settings = {"walks": 1, "moves": 5, "seed": 0, "measured_latencies": True}
    end = {"task": [NAME, True, 0, 15], "state": "", "cycles": [9, 8], "findings": []}
    digest = prepare.hashlib.sha256(DOT_PRODUCT.read_bytes()).hexdigest()

    def jobs(sha256: str, findings: list[str]) -> list[random_walks_on_gpu.Job]:
        ends = [{**end, "findings": findings}]
        path = tmp_path / "walks.json.gz"
        save(path, settings=settings, kernels={NAME: {"sha256": sha256, "ends": ends}})
        found, used = random_walks_on_gpu.jobs_of(options(tmp_path, prepared=path))
        assert used == settings
        return found

    (job,) = jobs(digest, [])
    assert job.measured_latencies and job.ends[0].cycles == (9, 8) and job.ends[0].task.tighten
    with pytest.raises(BadInput, match="prepared for another cubin"):
        jobs("0" * 64, [])
    with pytest.raises(BadInput, match="the verifier rejects walks of dot_product"):
        jobs(digest, ["short-latency"])


def test_a_second_run_continues_with_equal_settings_only(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    rows = [{"kernel": "b", "walks": 2, "wrong": [1]}, {"kernel": "a", "walks": 0, "skipped": "x",
                                                       "wrong": []}]  # fmt: skip
    assert random_walks_on_gpu._save(path, {"seed": 1}, rows) == (2, 1, 1)
    assert random_walks_on_gpu._earlier_rows(path, {"seed": 1}) == rows
    with pytest.raises(BadInput, match="give another --out"):
        random_walks_on_gpu._earlier_rows(path, {"seed": 2})
    assert random_walks_on_gpu._earlier_rows(tmp_path / "none.json", {}) == []


def test_freed_slack_counts_cycles_and_constraints(space: ScheduleSpace) -> None:
    measured = ScheduleSpace(space.program, space.function, measured_latencies=True)
    constraints, lowered = freed_slack.lowered_constraints(space, measured)
    assert constraints > lowered >= 0
    row = {"instructions": 8, "stalls": 100, "mined": 90, "measured": 85, "constraints": 9,
           "lowered": 1}  # fmt: skip
    total = freed_slack.summary({"a": row, "b": {**row, "measured": 90}})
    assert (total["kernels"], total["kernels_with_more"]) == (2, 1)
    assert (total["freed_share_mined"], total["freed_share_measured"]) == (0.1, 0.125)
