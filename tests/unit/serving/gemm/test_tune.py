"""Which entries the tuner takes, with times that are given instead of measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from nostall.core.measurement import Kind
from nostall.gpu.clock import Run, Samples
from nostall.serving.gemm.config import LinearShape
from nostall.serving.gemm.table import Cublas, Entry, GemmTable, LtAlgorithm
from nostall.serving.gemm.tune import Tuner

ALGORITHM = LtAlgorithm(b"a" * 64)


class FakeLayer:
    """A layer whose runs are known by their entry and M."""

    shape = LinearShape(4096, 4096)
    sms = 132

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def run(self, entry: Entry, m: int) -> Run:
        if self.fails and isinstance(entry, LtAlgorithm):
            raise ValueError("wrong result: relative difference 0.5 from F.linear")

        def run() -> tuple[Entry, int]:
            return entry, m

        return run

    def algorithms(self, m: int) -> list[bytes]:
        return [ALGORITHM.algorithm]


class FakeClock:
    """Gives the times of a function of the entry, M and whether it is a confirmation."""

    name = "fake"
    kind: Kind = "measured"

    def __init__(self, seconds: Callable[[Entry, int, bool], float]) -> None:
        self.seconds = seconds
        self.rng = np.random.default_rng(0)

    def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
        samples = []
        for run in runs:
            entry, m = run()  # type: ignore[misc]
            exact = self.seconds(entry, m, "screen" not in graph)
            samples.append((exact * self.rng.normal(1.0, 0.002, 30)).tolist())
        return samples


def tuned(seconds: Callable[[Entry, int, bool], float], **layer: bool) -> GemmTable:
    tuner = Tuner(FakeClock(seconds), "GPU", (), time.monotonic() + 60.0, lambda _: None)
    return tuner.tune(FakeLayer(**layer), grid=(1, 8, 512))


def times(faster: float, at: Callable[[int, bool], bool]) -> Callable[[Entry, int, bool], float]:
    """The algorithm takes ``faster`` of F.linear's time where ``at`` holds, otherwise 1.1 of it."""

    def seconds(entry: Entry, m: int, confirms: bool) -> float:
        if entry == ALGORITHM:
            return 1e-5 * (faster if at(m, confirms) else 1.1)
        return 1e-5 if isinstance(entry, Cublas) else 2e-5

    return seconds


def test_a_faster_entry_is_taken_for_each_interval() -> None:
    table = tuned(times(0.9, lambda m, confirms: True))
    assert [row.entry for row in table.rows] == [ALGORITHM] * 3
    assert all(1.09 < row.low < row.ratio < 1.13 for row in table.rows)


def test_an_entry_that_is_faster_only_at_first_is_not_taken() -> None:
    table = tuned(times(0.9, lambda m, confirms: not confirms))
    assert [row.entry for row in table.rows] == [Cublas()]


@pytest.mark.parametrize("faster", [0.9995, 0.99])
def test_an_entry_within_the_noise_of_captures_is_not_taken(faster: float) -> None:
    assert [row.entry for row in tuned(times(faster, lambda *_: True)).rows] == [Cublas()]


def test_an_entry_that_gains_no_more_than_the_null_is_not_taken() -> None:
    """The second capture of F.linear is as much faster than the first one as the entry is."""

    class ClockWithNoisyCaptures(FakeClock):
        def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
            linear, *others, last = super().samples(graph, runs, seconds)
            is_null = "confirmation" in graph
            return [linear, *others, [0.9 * s for s in last] if is_null else last]

    clock = ClockWithNoisyCaptures(times(0.92, lambda *_: True))
    tuner = Tuner(clock, "GPU", (), time.monotonic() + 60.0, lambda _: None)
    table = tuner.tune(FakeLayer(), grid=(1, 8))
    assert [row.entry for row in table.rows] == [Cublas()]


def test_an_entry_that_is_slower_in_the_middle_of_its_interval_is_not_taken() -> None:
    table = tuned(times(0.9, lambda m, confirms: m not in (5, 260)))
    assert [(row.m, row.entry) for row in table.rows] == [(1, ALGORITHM), (512, Cublas())]


def test_an_entry_that_is_slower_at_the_first_m_of_its_interval_is_not_taken() -> None:
    table = tuned(times(0.9, lambda m, confirms: m in (1, 8, 512)))
    assert [(row.m, row.entry) for row in table.rows] == [(1, ALGORITHM), (512, Cublas())]


def test_an_entry_with_a_wrong_result_is_not_taken() -> None:
    assert [row.entry for row in tuned(times(0.9, lambda *_: True), fails=True).rows] == [Cublas()]


def test_behind_the_deadline_rows_are_cublas() -> None:
    tuner = Tuner(FakeClock(times(0.9, lambda *_: True)), "GPU", (), 0.0, lambda _: None)
    table = tuner.tune(FakeLayer(), grid=(1, 8))
    assert [row.entry for row in table.rows] == [Cublas()]
