"""One process per GPU: what runs where, and what a lost or hung worker costs."""

from __future__ import annotations

import os
import time
from time import monotonic

import pytest

from benchmarks.harness import gpu_pool


def where(job: str) -> tuple[str, str, int]:
    if job == "dies":
        os._exit(9)
    if job == "fails":
        raise ValueError("a job that fails")
    return job, os.environ["CUDA_VISIBLE_DEVICES"], os.getpid()


def test_each_gpu_has_a_process_and_a_lost_one_costs_its_job() -> None:
    queues = [["a", "dies", "b", "fails", "c"], ["d"]]
    found = list(gpu_pool.spread(where, queues, ["3", "7"], monotonic() + 60, lambda _: 0.0))
    seen = {answer.job: answer for answer in found}
    assert set(seen) == {"a", "dies", "b", "fails", "c", "d"}
    gpu = {job: answer.result[1] for job, answer in seen.items() if answer.result}
    assert gpu == {"a": "3", "b": "3", "c": "3", "d": "7"}
    process = {job: answer.result[2] for job, answer in seen.items() if answer.result}
    assert process["b"] == process["c"] != process["a"]
    assert "abruptly" in str(seen["dies"].error) and "a job that fails" in str(seen["fails"].error)


def test_a_job_that_would_end_too_late_is_not_begun() -> None:
    queues = [[0.01, 1000.0, 0.01]]
    found = list(
        gpu_pool.spread(time.sleep, queues, ["0"], monotonic() + 60, lambda seconds: seconds)
    )
    assert [answer.job for answer in found] == [0.01]


def test_a_job_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_pool, "_SLACK", 0.5)
    queues = [[60.0, 0.01]]
    found = list(gpu_pool.spread(time.sleep, queues, ["0"], monotonic() + 60, lambda _: 0.0))
    assert isinstance(found[0].error, TimeoutError) and found[1].error is None


def test_a_kernel_stays_on_one_gpu() -> None:
    items = [(name, seed) for seed in range(3) for name in "abcde"]
    queues = gpu_pool.dealt(items, 2, lambda item: item[0], "abcde")
    assert [{name for name, _ in queue} for queue in queues] == [{"a", "c", "e"}, {"b", "d"}]
    assert [seed for _, seed in queues[1]] == [0, 0, 1, 1, 2, 2]
    rest = [item for item in items if item != ("a", 0)]
    assert gpu_pool.dealt(rest, 2, lambda item: item[0], "abcde")[1] == queues[1]


def test_visible_gpus_are_those_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5")
    assert gpu_pool.visible() == ["2", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_pool.visible() == []
