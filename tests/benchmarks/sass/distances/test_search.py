"""The search finds exactly the latency table of a simulated device."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.sass.distances.microkernels.kernel import STREAMS
from benchmarks.sass.distances.microkernels.pairs import Pair, all_pairs
from benchmarks.sass.distances.observe import Condition
from benchmarks.sass.distances.search import ALIGNMENTS, measure
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.benchmarks.sass.distances.fake_prober import OVERHEAD, FakeProber

PAIRS = {pair.name: pair for pair in all_pairs()}
CHOSEN = [PAIRS[name] for name in list(PAIRS)[::701]]


@settings(max_examples=5, deadline=None)
@given(st.sampled_from(CHOSEN), st.integers(1, 40), st.integers(4, 24))
def test_the_minimum_is_that_of_the_device(
    template: bytes, pair: Pair, minimum: int, top: int
) -> None:
    prober = FakeProber(lambda *_: minimum)
    row = measure(pair, top, template, prober, ALIGNMENTS[:2]).as_json()
    assert row["largest_wrong"] == minimum - 1
    assert row["smallest_right"] == minimum
    assert row["wrong_but_not_stale"] == 0
    assert row["clock_overhead"] == OVERHEAD


@pytest.mark.parametrize(
    ("condition", "worse"),
    [
        ("alignment", lambda c, place, y: c.alignment == 5),
        ("warps", lambda c, place, y: c.warps == 16),
        ("stream", lambda c, place, y: STREAMS[c.stream] == "UIADD3"),
        ("spacing", lambda c, place, y: y),
    ],
)
def test_the_minimum_is_the_largest_of_all_conditions(
    template: bytes, condition: str, worse: object
) -> None:
    def minimum(_: str, c: Condition, place: int, yields: bool) -> int:
        return 7 if worse(c, place, yields) else 4  # type: ignore[operator]

    pair = PAIRS["IADD3>R|LOP3.LUT.a"]
    row = measure(pair, 5, template, FakeProber(minimum)).as_json()
    assert row["largest_wrong"] == 6
    assert row["smallest_right"] == 7
    assert set(row["largest_wrong_by"][condition].values()) == {3, 6}


def test_all_warp_counts_streams_and_alignments_run(template: bytes) -> None:
    prober = FakeProber(lambda *_: 5)
    measure(PAIRS["FFMA>R|FADD.a"], 6, template, prober)
    assert {c.alignment for c in prober.launches} == set(ALIGNMENTS)
    assert {c.warps for c in prober.launches} == {1, 2, 4, 8, 16}
    assert {c.stream for c in prober.launches} == set(range(len(STREAMS)))


def test_delayed_results_prove_no_distance(template: bytes) -> None:
    class Delayed(FakeProber):
        def run(self, *arguments: object) -> object:  # type: ignore[override]
            hashes, cycles = super().run(*arguments)  # type: ignore[arg-type]
            cycles[2:] += np.uint32(1)
            return hashes, cycles

    row = measure(PAIRS["FFMA>R|FADD.a"], 6, template, Delayed(lambda *_: 1)).as_json()
    assert row["largest_wrong"] == 0
    assert row["smallest_right"] is None


def test_a_pair_that_stale_values_do_not_change_is_blind(template: bytes) -> None:
    class Blind(FakeProber):
        def run(self, *arguments: object) -> object:  # type: ignore[override]
            hashes, cycles = super().run(*arguments)  # type: ignore[arg-type]
            return np.zeros_like(hashes), cycles

    row = measure(PAIRS["FFMA>R|FADD.a"], 6, template, Blind(lambda *_: 1)).as_json()
    assert row == {
        "pair": "FFMA>R|FADD.a",
        "problem": "blind: 0% of the results depend on the value",
    }
