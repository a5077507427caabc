"""The GPU device with a worker process: crashes, hangs, prefetch hints; needs no GPU."""

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
from nostall.gpu import (
    Kernel,
    LocalGpu,
    MeasurementPlan,
    Outcome,
    Timing,
)
from tests.unit.gpu.replayed_device import RecordingDevice, ReplayedDevice

KERNEL = Kernel(b"original", "k", LaunchSpec())
PLAN = MeasurementPlan(deadline=2.0)


class FakeEvaluator:
    """Does what the candidate's bytes say."""

    def __init__(self, plan: MeasurementPlan) -> None:
        self.plan = plan
        self.next_hint: Callable[[], bytes | None] = lambda: None

    def info(self) -> Mapping[str, str]:
        return {"gpu": "none", "process": str(os.getpid())}

    def evaluate(self, cubin: bytes) -> Outcome:
        if cubin == b"die":
            os._exit(7)
        if cubin == b"hang":
            time.sleep(60)
        if cubin == b"listen":
            return Outcome("agrees", detail=self.wait_for_hint())
        if cubin.startswith(b"pause once:"):
            mark = Path(cubin.partition(b":")[2].decode())
            if not mark.exists():
                mark.touch()
                time.sleep(60)
        if cubin == b"fault":
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
        return Outcome("timed", Timing((1.0, 1.0), (0.5, 0.5)))

    def wait_for_hint(self) -> str:
        until = time.monotonic() + (5.0 if self.plan.prefetch else 0.3)
        while time.monotonic() < until:
            if hint := self.next_hint():
                return hint.decode()
        return "no hint"

    def check(self, cubin: bytes, first: int, count: int) -> Outcome:
        if cubin == b"nondeterministic" and first + count > 20:
            raise BadInput("k is not deterministic")
        if cubin == b"hang late" and first + count > 20:
            time.sleep(60)
        wrong = cubin == b"wrong at 100" and first <= 100 < first + count
        detail = "sample 100" if wrong else f"{first} + {count}"
        return Outcome("wrong" if wrong else "agrees", detail=detail, phase_seconds={"check": 0.25})

    def compare(self, cubin: bytes, rounds: int) -> Outcome:
        samples = (1.0,) * rounds
        return Outcome("timed", Timing(samples, samples, samples))


def make_fake(kernel: Kernel, plan: MeasurementPlan, ordinal: int) -> FakeEvaluator:
    if kernel.name == "nondeterministic":
        raise BadInput("nondeterministic is not deterministic")
    if kernel.name == "crash":
        os._exit(3)
    return FakeEvaluator(plan)


def test_a_fault_ends_only_its_candidate() -> None:
    with LocalGpu(KERNEL, PLAN, make=make_fake) as gpu:
        first = gpu.info["process"]
        assert gpu.evaluate(b"good").status == "timed"
        fault = gpu.evaluate(b"fault")
        assert fault.status == "fault"
        assert "ILLEGAL_ADDRESS" in fault.detail
        assert gpu.evaluate(b"good").status == "timed"
        assert gpu.info["process"] != first
        crash = gpu.evaluate(b"die")
        assert crash.status == "fault"
        assert "exit code 7" in crash.detail
        assert gpu.evaluate(b"good").status == "timed"
        assert gpu.restarts == 2


def test_a_hang_ends_at_its_deadline() -> None:
    with LocalGpu(KERNEL, PLAN, make=make_fake) as gpu:
        before = time.monotonic()
        assert gpu.evaluate(b"hang").status == "hang"
        assert 2 * PLAN.deadline <= time.monotonic() - before < 12.0
        assert gpu.evaluate(b"good").status == "timed"


def test_a_pause_is_no_hang(tmp_path: Path) -> None:
    """A candidate that misses its deadline once is evaluated a second time."""
    with LocalGpu(KERNEL, PLAN, make=make_fake) as gpu:
        assert gpu.evaluate(b"pause once:" + bytes(tmp_path / "paused")).status == "timed"
        assert gpu.restarts == 1


def test_a_comparison_runs_in_a_new_process() -> None:
    with LocalGpu(KERNEL, PLAN, make=make_fake) as gpu:
        before = gpu.info["process"]
        assert gpu.compare(b"good", rounds=4, checks=1).timing is not None
        assert gpu.info["process"] != before


def test_checks_are_requested_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalGpu(KERNEL, PLAN, make=make_fake) as gpu:
        batches: list[tuple[int, int]] = []
        send = gpu._send

        def recorded_send(request: tuple[Any, ...], seconds: float) -> Any:
            batches.extend([request[2:]] if request[0] == "check" else [])
            return send(request, seconds)

        monkeypatch.setattr(gpu, "_send", recorded_send)
        outcome = gpu.compare(b"good", rounds=4, checks=1000)
        assert outcome.status == "timed"
        assert outcome.phase_seconds["check"] == 0.25 * len(batches)
        assert batches[0] == (0, 16) and len(batches) < 8
        ends = [first + count for first, count in batches]
        assert [first for first, _ in batches[1:]] == ends[:-1] and ends[-1] == 1000
        wrong = gpu.compare(b"wrong at 100", rounds=4, checks=1000)
        assert (wrong.status, wrong.detail, wrong.timing) == ("wrong", "sample 100", None)


def test_an_error_or_a_hang_during_many_checks_ends_them() -> None:
    """A nondeterministic kernel raises; a hang is noticed within the deadline."""
    with LocalGpu(KERNEL, PLAN, make=make_fake) as gpu:
        with pytest.raises(BadInput, match="not deterministic"):
            gpu.compare(b"nondeterministic", rounds=4, checks=50)
        before = time.monotonic()
        assert gpu.compare(b"hang late", rounds=4, checks=10**7).status == "hang"
        assert time.monotonic() - before < 15.0


def test_a_device_works_while_its_caller_does_something_else() -> None:
    with LocalGpu(KERNEL, PLAN, make=make_fake) as gpu:
        for candidate, status in ((b"good", "timed"), (b"fault", "fault"), (b"good", "timed")):
            pending = gpu.start(candidate)
            while not pending.ready():
                time.sleep(0.01)
            assert pending.wait().status == status


def test_a_busy_worker_receives_prefetch_hints() -> None:
    with LocalGpu(KERNEL, replace(PLAN, prefetch=True, deadline=8.0), make=make_fake) as gpu:
        pending = gpu.start(b"listen")
        pending.prefetch(b"x" * 100_000)  # larger than a slot
        pending.prefetch(b"one")
        pending.prefetch(b"two")
        assert pending.wait().detail == "one"
        pending.prefetch(b"after the outcome")
        pending = gpu.start(b"listen")
        pending.prefetch(b"three")
        assert pending.wait().detail == "three"  # hints for the previous request are dropped
        pending = gpu.start(b"fault")
        pending.prefetch(b"four")
        assert pending.wait().status == "fault"
        pending.prefetch(b"five")
        assert gpu.evaluate(b"good").status == "timed"
    with LocalGpu(KERNEL, replace(PLAN, prefetch=False), make=make_fake) as gpu:
        pending = gpu.start(b"listen")
        pending.prefetch(b"disabled")
        assert pending.wait().detail == "no hint"


@pytest.mark.parametrize(
    ("name", "message"), [("nondeterministic", "deterministic"), ("crash", "code 3")]
)
def test_a_worker_that_cannot_start_reports_why(name: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        LocalGpu(Kernel(b"", name, LaunchSpec()), PLAN, make=make_fake)


def test_a_replayed_device_returns_the_recorded_outcomes(tmp_path: Path) -> None:
    with LocalGpu(KERNEL, PLAN, make=make_fake) as gpu:
        recording = RecordingDevice(gpu)
        outcomes = [
            recording.evaluate(b"good"),
            recording.evaluate(b"die"),
            recording.compare(b"good", 3, 1),
        ]
        recording.save(tmp_path / "measured.json")
    replayed = ReplayedDevice(tmp_path / "measured.json")
    assert replayed.evaluate(b"good") == outcomes[0]
    assert replayed.evaluate(b"die") == outcomes[1]
    assert replayed.compare(b"good", 3, 1) == outcomes[2]
    with pytest.raises(BadRun, match="another seed"):
        replayed.evaluate(b"never measured")


def test_an_invalid_recording_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"records": 3}')
    with pytest.raises(BadRun, match="not a recording"):
        ReplayedDevice(tmp_path / "x.json")


@pytest.mark.parametrize("terminal", [False, True])
def test_the_outcome_of_an_interrupted_request_does_not_answer_the_next_one(
    terminal: bool,
) -> None:
    """Ctrl-C in a terminal also reaches the worker; it is not a fault of the next candidate."""
    with LocalGpu(KERNEL, PLAN, make=make_fake) as gpu:
        worker = int(gpu.info["process"])

        def interrupt() -> None:
            if terminal:
                os.kill(worker, signal.SIGINT)
            _thread.interrupt_main()

        threading.Timer(0.5, interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            gpu.evaluate(b"hang")
        assert gpu.evaluate(b"good").status == "timed"
        assert int(gpu.info["process"]) != worker
