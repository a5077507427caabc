"""The GPU pool: assignment of jobs to processes, and lost or hung processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from time import monotonic

import pytest

from benchmarks.harness import gpu_pool


class OddError(Exception):
    """An exception that can be pickled, but not unpickled."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{reason} {code}")


def run_job(job: str) -> tuple[str, str, int]:
    """Return the job, its GPU and its process, or do what the job says."""
    if job == "dies":
        os._exit(9)
    if job == "fails":
        raise ValueError("a job that fails")
    if job == "fails oddly":
        raise OddError(5, "reason")
    if job == "returns a lock":
        return threading.Lock()  # type: ignore[return-value]
    return job, os.environ["CUDA_VISIBLE_DEVICES"], os.getpid()


def test_each_gpu_has_a_process_and_a_lost_process_fails_only_its_job() -> None:
    queues = [["a", "dies", "b", "fails", "c"], ["d"]]
    answers = list(gpu_pool.run_jobs(run_job, queues, ["3", "7"], monotonic() + 60, lambda _: 0.0))
    results = {answer.job: answer for answer in answers}
    assert set(results) == {"a", "dies", "b", "fails", "c", "d"}
    gpu = {job: answer.result[1] for job, answer in results.items() if answer.result}
    assert gpu == {"a": "3", "b": "3", "c": "3", "d": "7"}
    process = {job: answer.result[2] for job, answer in results.items() if answer.result}
    assert process["b"] == process["c"] != process["a"]
    lost = results["dies"].error
    assert isinstance(lost, gpu_pool.WorkerLost) and "exit code 9" in str(lost)
    failure = results["fails"].error
    assert isinstance(failure, ValueError) and "a job that fails" in str(failure)
    assert "run_job" in failure.__notes__[0]  # the traceback in the process


def test_errors_and_results_that_cannot_be_sent_are_errors_of_their_job() -> None:
    queues = [["a", "fails oddly", "returns a lock", "b"]]
    answers = list(gpu_pool.run_jobs(run_job, queues, ["0"], monotonic() + 60, lambda _: 0.0))
    first, odd, lock, last = answers
    assert str(odd.error) == "OddError: reason 5"
    assert isinstance(lock.error, TypeError) and "pickle" in str(lock.error)
    assert first.result and last.result and first.result[2] == last.result[2]


def test_a_job_that_would_end_too_late_does_not_start() -> None:
    queues = [[0.01, 1000.0, 0.01]]
    until = monotonic() + 60
    answers = list(gpu_pool.run_jobs(time.sleep, queues, ["0"], until, lambda seconds: seconds))
    assert [answer.job for answer in answers] == [0.01]


def test_a_hung_job_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_pool, "_SLACK_SECONDS", 0.5)
    queues = [[60.0, 0.01]]
    answers = list(gpu_pool.run_jobs(time.sleep, queues, ["0"], monotonic() + 60, lambda _: 0.0))
    assert isinstance(answers[0].error, TimeoutError) and answers[1].error is None


def test_closing_a_worker_ends_its_process() -> None:
    worker = gpu_pool._GpuWorker("0")
    _, _, pid = worker.call(run_job, "a", 60.0)
    os.kill(pid, 0)
    worker.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    _, _, other = worker.call(run_job, "b", 60.0)
    os.kill(other, signal.SIGKILL)
    with pytest.raises(gpu_pool.WorkerLost, match="exit code -9"):
        worker.call(run_job, "c", 60.0)
    worker.close()


def test_jobs_with_the_same_name_share_a_gpu() -> None:
    items = [(name, seed) for seed in range(3) for name in "abcde"]
    queues = gpu_pool.assign_queues(items, 2, lambda item: item[0], "abcde")
    assert [{name for name, _ in queue} for queue in queues] == [{"a", "c", "e"}, {"b", "d"}]
    assert [seed for _, seed in queues[1]] == [0, 0, 1, 1, 2, 2]
    rest = [item for item in items if item != ("a", 0)]
    assert gpu_pool.assign_queues(rest, 2, lambda item: item[0], "abcde")[1] == queues[1]


def test_visible_gpus_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5")
    assert gpu_pool.visible_gpus() == ["2", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_pool.visible_gpus() == []
