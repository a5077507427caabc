"""The parent survives whatever a worker does; no GPU is needed for that."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from nostall.core import BadInput, LaunchSpec
from nostall.core.errors import BadRun
from nostall.gpu import Kernel, LocalGpu, Outcome, Plan, Recording, Replay, Timing

KERNEL = Kernel(b"original", "k", LaunchSpec())
PLAN = Plan(deadline=2.0)


class Pretender:
    """Obeys the candidate's bytes."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def about(self) -> Mapping[str, str]:
        return {"gpu": "none", "process": str(os.getpid())}

    def evaluate(self, cubin: bytes) -> Outcome:
        if cubin == b"die":
            os._exit(7)
        if cubin == b"hang":
            time.sleep(60)
        if cubin == b"fault":
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
        return Outcome("timed", Timing((1.0, 1.0), (0.5, 0.5)))

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        one = (1.0,) * rounds
        return Outcome("timed", Timing(one, one, one))


def pretend(kernel: Kernel, plan: Plan, ordinal: int) -> Pretender:
    if kernel.name == "unrepeatable":
        raise BadInput("unrepeatable is not deterministic")
    if kernel.name == "crash":
        os._exit(3)
    return Pretender(plan)


def test_a_fault_costs_one_candidate() -> None:
    with LocalGpu(KERNEL, PLAN, make=pretend) as gpu:
        first = gpu.about["process"]
        assert gpu.evaluate(b"good").fate == "timed"
        fault = gpu.evaluate(b"fault")
        assert fault.fate == "fault"
        assert "ILLEGAL_ADDRESS" in fault.detail
        assert gpu.evaluate(b"good").fate == "timed"
        assert gpu.about["process"] != first
        died = gpu.evaluate(b"die")
        assert died.fate == "fault"
        assert "exit code 7" in died.detail
        assert gpu.evaluate(b"good").fate == "timed"
        assert gpu.restarts == 2


def test_a_hang_ends_at_its_deadline() -> None:
    with LocalGpu(KERNEL, PLAN, make=pretend) as gpu:
        before = time.monotonic()
        assert gpu.evaluate(b"hang").fate == "hang"
        assert 2.0 <= time.monotonic() - before < 10.0
        assert gpu.evaluate(b"good").fate == "timed"


def test_a_comparison_runs_in_a_fresh_process() -> None:
    with LocalGpu(KERNEL, PLAN, make=pretend) as gpu:
        before = gpu.about["process"]
        assert gpu.compare(b"good", rounds=4, checks=1).timing is not None
        assert gpu.about["process"] != before


@pytest.mark.parametrize(("name", "text"), [("unrepeatable", "deterministic"), ("crash", "code 3")])
def test_a_worker_that_cannot_start_says_why(name: str, text: str) -> None:
    with pytest.raises(BadInput, match=text):
        LocalGpu(Kernel(b"", name, LaunchSpec()), PLAN, make=pretend)


def test_a_recording_plays_back(tmp_path: Path) -> None:
    with LocalGpu(KERNEL, PLAN, make=pretend) as gpu:
        kept = Recording(gpu)
        answers = [kept.evaluate(b"good"), kept.evaluate(b"die"), kept.compare(b"good", 3, 1)]
        kept.save(tmp_path / "measured.json")
    replay = Replay(tmp_path / "measured.json")
    again = [replay.evaluate(b"good"), replay.evaluate(b"die"), replay.compare(b"good", 3, 1)]
    assert again == answers
    with pytest.raises(BadRun, match="another seed"):
        replay.evaluate(b"never seen")


def test_a_broken_recording_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"records": 3}')
    with pytest.raises(BadRun, match="not a recording"):
        Replay(tmp_path / "x.json")
