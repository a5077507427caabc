"""The parent survives whatever a worker does; no GPU is needed for that."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

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
        self.foretold: Callable[[], bytes | None] = lambda: None

    def about(self) -> Mapping[str, str]:
        return {"gpu": "none", "process": str(os.getpid())}

    def evaluate(self, cubin: bytes) -> Outcome:
        if cubin == b"die":
            os._exit(7)
        if cubin == b"hang":
            time.sleep(60)
        if cubin == b"listen":
            return Outcome("agrees", detail=self.heard())
        if cubin.startswith(b"pause once:"):
            mark = Path(cubin.partition(b":")[2].decode())
            if not mark.exists():
                mark.touch()
                time.sleep(60)
        if cubin == b"fault":
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
        return Outcome("timed", Timing((1.0, 1.0), (0.5, 0.5)))

    def heard(self) -> str:
        until = time.monotonic() + (5.0 if self.plan.ahead else 0.3)
        while time.monotonic() < until:
            if found := self.foretold():
                return found.decode()
        return "nothing"

    def check(self, cubin: bytes, first: int, count: int) -> Outcome:
        if cubin == b"unrepeatable" and first + count > 20:
            raise BadInput("k is not deterministic")
        if cubin == b"slow to hang" and first + count > 20:
            time.sleep(60)
        wrong = cubin == b"wrong at 100" and first <= 100 < first + count
        detail = "sample 100" if wrong else f"{first} + {count}"
        return Outcome("wrong" if wrong else "agrees", detail=detail, spent={"check": 0.25})

    def compare(self, cubin: bytes, rounds: int) -> Outcome:
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
        assert 2 * PLAN.deadline <= time.monotonic() - before < 12.0
        assert gpu.evaluate(b"good").fate == "timed"


def test_a_pause_is_no_hang(tmp_path: Path) -> None:
    """Who does not answer once, on a GPU that others share, is asked again."""
    with LocalGpu(KERNEL, PLAN, make=pretend) as gpu:
        assert gpu.evaluate(b"pause once:" + bytes(tmp_path / "paused")).fate == "timed"
        assert gpu.restarts == 1


def test_a_comparison_runs_in_a_fresh_process() -> None:
    with LocalGpu(KERNEL, PLAN, make=pretend) as gpu:
        before = gpu.about["process"]
        assert gpu.compare(b"good", rounds=4, checks=1).timing is not None
        assert gpu.about["process"] != before


def test_checks_go_out_in_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalGpu(KERNEL, PLAN, make=pretend) as gpu:
        asked: list[tuple[int, int]] = []
        send = gpu._asked

        def watched(question: tuple[Any, ...], seconds: float) -> Any:
            asked.extend([question[2:]] if question[0] == "check" else [])
            return send(question, seconds)

        monkeypatch.setattr(gpu, "_asked", watched)
        outcome = gpu.compare(b"good", rounds=4, checks=1000)
        assert outcome.fate == "timed"
        assert outcome.spent["check"] == 0.25 * len(asked)
        assert asked[0] == (0, 16) and len(asked) < 8
        ends = [first + count for first, count in asked]
        assert [first for first, _ in asked[1:]] == ends[:-1] and ends[-1] == 1000
        wrong = gpu.compare(b"wrong at 100", rounds=4, checks=1000)
        assert (wrong.fate, wrong.detail, wrong.timing) == ("wrong", "sample 100", None)


def test_what_comes_up_during_many_checks_ends_them() -> None:
    """A kernel that does not repeat itself stops the job; a hang is noticed within the deadline."""
    with LocalGpu(KERNEL, PLAN, make=pretend) as gpu:
        with pytest.raises(BadInput, match="not deterministic"):
            gpu.compare(b"unrepeatable", rounds=4, checks=50)
        before = time.monotonic()
        assert gpu.compare(b"slow to hang", rounds=4, checks=10**7).fate == "hang"
        assert time.monotonic() - before < 15.0


def test_a_device_works_while_its_user_does_something_else() -> None:
    with LocalGpu(KERNEL, PLAN, make=pretend) as gpu:
        for candidate, fate in ((b"good", "timed"), (b"fault", "fault"), (b"good", "timed")):
            pending = gpu.start(candidate)
            while not pending.ready():
                time.sleep(0.01)
            assert pending.wait().fate == fate


def test_a_busy_worker_is_told_what_may_come_next() -> None:
    with LocalGpu(KERNEL, replace(PLAN, ahead=True, deadline=8.0), make=pretend) as gpu:
        pending = gpu.start(b"listen")
        pending.foresee(b"x" * 100_000)  # larger than any candidate of this kernel
        pending.foresee(b"one")
        pending.foresee(b"two")
        assert pending.wait().detail == "one"
        pending.foresee(b"nobody waits")
        pending = gpu.start(b"listen")
        pending.foresee(b"three")
        assert pending.wait().detail == "three"  # what came late is forgotten
        pending = gpu.start(b"fault")
        pending.foresee(b"four")
        assert pending.wait().fate == "fault"
        pending.foresee(b"five")
        assert gpu.evaluate(b"good").fate == "timed"
    with LocalGpu(KERNEL, replace(PLAN, ahead=False), make=pretend) as gpu:
        pending = gpu.start(b"listen")
        pending.foresee(b"not asked for")
        assert pending.wait().detail == "nothing"


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


@pytest.mark.parametrize("terminal", [False, True])
def test_an_interrupted_question_is_not_answered_to_the_next_one(terminal: bool) -> None:
    """Ctrl-C in a terminal reaches the worker, too: it is not a fault of the next candidate."""
    with LocalGpu(KERNEL, PLAN, make=pretend) as gpu:
        worker = int(gpu.about["process"])

        def interrupt() -> None:
            if terminal:
                os.kill(worker, signal.SIGINT)
            _thread.interrupt_main()

        threading.Timer(0.5, interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            gpu.evaluate(b"hang")
        assert gpu.evaluate(b"good").fate == "timed"
        assert int(gpu.about["process"]) != worker
