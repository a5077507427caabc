"""Changes that need a start: starts take turns, and what they show is compared."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nostall.optimizing.diagnosis import Level
from nostall.optimizing.job import Options
from nostall.optimizing.program import Program, ProgramEnded
from nostall.optimizing.result import Result
from nostall.optimizing.starts import Starts, needs_start, obstacle
from tests.e2e.cli import nostall

CHANGE = {"name": "loader workers", "kind": "loader", "value": "workers=2"}
LEVEL = Level("loader workers", "loader", 0.5, 2.0, "", change=CHANGE)


class Start:
    """A program in which a step takes so many seconds."""

    def __init__(self, seconds: float, batches: list[float]) -> None:
        self.seconds, self.batches = seconds, batches

    def wait_watched(self, until: float, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"loader": {"batches": self.batches}}

    def ask(self, until: float, **order: Any) -> list[Mapping[str, Any]]:
        blocks = [
            {"event": "block", "arm": arm, "failures": [],
             "seconds": self.seconds * order["steps"] * (1 + 0.01 * (at % 3))}
            for at, arm in enumerate(order["blocks"])
        ]  # fmt: skip
        return [*blocks, {"event": "done"}]


def attempt(seconds: list[float], batches: list[float], crash: bool = False) -> tuple[Any, Result]:
    """``seconds`` of a step in each start with the change; without it takes 0.1."""
    left, result = [*seconds], Result(["python"])

    @contextmanager
    def start(settings: Mapping[str, Any]) -> Iterator[Any]:
        if not settings:
            yield Start(0.1, [1.0, 2.0])
        elif crash:
            raise ProgramEnded("the program ended")
        else:
            yield Start(left.pop(0), batches)

    starts = Starts(result, [], 0.1, 0, start, 1e9)
    return starts.attempt(LEVEL), result


def test_a_faster_start_is_kept_with_its_class() -> None:
    found, result = attempt([0.05, 0.052], [1.0, 2.0])
    assert (found.outcome, found.result_class) == ("kept", "bit-equal")
    assert result.together is not None and result.together.faster
    found, _ = attempt([0.05, 0.052], [1.0, 3.0])
    assert (found.outcome, found.result_class) == ("kept", "other random numbers")


def test_a_slow_start_refutes_the_fast_one_and_a_crash_refuses() -> None:
    found, result = attempt([0.05, 0.11], [1.0, 2.0])
    assert found.outcome != "kept" and result.together is None
    found, _ = attempt([], [], crash=True)
    assert found.outcome == "refused" and "the program ended" in found.reason


def test_a_program_that_writes_files_is_not_started_again() -> None:
    assert needs_start(LEVEL)
    assert "--again" in obstacle(Options(), ["python", "x.py"], ["log.txt"])
    assert not obstacle(Options(again=True), ["python", "x.py"], ["log.txt"])
    assert not obstacle(Options(), ["python", "x.py", "{scratch}"], ["log.txt"])
    assert obstacle(Options(run_to_end=True), ["python", "x.py"], [])


def test_what_goes_wrong_in_another_rank_counts() -> None:
    program = object.__new__(Program)
    program.pid = 1
    own = {"process": 1, "refusal": "", "failures": ["a"]}
    found = program._of_all_ranks(own, [own, {"process": 2, "refusal": "b", "failures": ["c"]}])
    assert found["refusal"] == "in another rank: b" and found["failures"] == ["a", "c"]
    assert program._of_all_ranks(own, [own]) == own


RANKS = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.parallel.DistributedDataParallel(nn.Sequential(*[nn.Linear(8, 8) for _ in range(40)]))
optimizer, x = torch.optim.AdamW(model.parameters(), 1e-3), torch.randn(4, 8)
for _ in range(100_000):
    optimizer.zero_grad()
    model(x).sum().backward(retain_graph=True)  # which is not compiled
    optimizer.step()
"""


@pytest.mark.slow
def test_ranks_of_torchrun_go_the_whole_way(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    torchrun = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    if torchrun is None:
        pytest.skip("no torchrun beside this Python")
    (tmp_path / "ranks.py").write_text(RANKS)
    done = nostall("optimize", "--minutes", "0.5", "--", torchrun, "--nproc_per_node", "2",
                   "ranks.py", cwd=tmp_path)  # fmt: skip
    assert done.code == 0 and "DistributedDataParallel" in done.err
    assert "fused optimiser: " in done.err and "outlived" not in done.out
