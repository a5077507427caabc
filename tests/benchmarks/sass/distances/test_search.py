"""The search finds exactly the latency table of a simulated device."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.sass.distances.microkernels.kernel import STREAMS
from benchmarks.sass.distances.microkernels.overwrites import overwrite_pairs
from benchmarks.sass.distances.microkernels.pairs import Pair, all_pairs
from benchmarks.sass.distances.observe import Condition
from benchmarks.sass.distances.search import ALIGNMENTS, measure
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.benchmarks.sass.distances.fake_prober import OVERHEAD, FakeProber

pytestmark = pytest.mark.slow

PAIRS = {pair.name: pair for pair in (*all_pairs(), *overwrite_pairs())}
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


@pytest.mark.parametrize("name", ["IMAD.WIDE>R+0|DADD.a+0", "IADD3>R|IMAD.WIDE.U32.a"])
def test_mixes_of_stale_and_fresh_words_are_torn(template: bytes, name: str) -> None:
    row = measure(PAIRS[name], 6, template, FakeProber(lambda *_: 5, mixes=True)).as_json()
    assert row["largest_wrong"] == 4 and row["smallest_right"] == 5
    assert row["torn"] > 0 and row["wrong_but_not_stale"] == 0 and row["unexplained"] == []


def test_other_wrong_results_are_kept_as_samples(template: bytes) -> None:
    class Odd(FakeProber):
        def run(self, *arguments: object) -> object:  # type: ignore[override]
            records = super().run(*arguments)  # type: ignore[arg-type]
            records.words[3:] += np.uint32(7)
            return records._replace(hashes=records.words[..., 0])

    row = measure(PAIRS["IADD3>R|IMAD.WIDE.U32.a"], 6, template, Odd(lambda *_: 1)).as_json()
    assert row["wrong_but_not_stale"] > 0
    sample = row["unexplained"][0]
    assert sample["words"] == [(word + 7) % (1 << 32) for word in sample["right"]]
    assert set(sample) == {"distance", "pass", "thread", "words", "right", "stale"}


def test_a_pair_that_always_takes_longer_is_not_delayed(template: bytes) -> None:
    class Slow(FakeProber):
        def run(self, *arguments: object) -> object:  # type: ignore[override]
            records = super().run(*arguments)  # type: ignore[arg-type]
            records.cycles[[0, *range(2, len(records.cycles))]] += np.uint32(2)
            return records

    row = measure(PAIRS["IADD3>R|FFMA.a"], 6, template, Slow(lambda *_: 4)).as_json()
    assert row["smallest_right"] == 4 and row["clock_overhead"] == OVERHEAD + 2


def test_delayed_results_prove_no_distance(template: bytes) -> None:
    class Delayed(FakeProber):
        def run(self, *arguments: object) -> object:  # type: ignore[override]
            records = super().run(*arguments)  # type: ignore[arg-type]
            records.cycles[2:] += np.uint32(1)
            return records

    row = measure(PAIRS["FFMA>R|FADD.a"], 6, template, Delayed(lambda *_: 1)).as_json()
    assert row["largest_wrong"] == 0
    assert row["smallest_right"] is None


def test_a_pair_that_stale_values_do_not_change_is_blind(template: bytes) -> None:
    class Blind(FakeProber):
        def run(self, *arguments: object) -> object:  # type: ignore[override]
            records = super().run(*arguments)  # type: ignore[arg-type]
            return records._replace(hashes=np.zeros_like(records.hashes))

    row = measure(PAIRS["FFMA>R|FADD.a"], 6, template, Blind(lambda *_: 1)).as_json()
    assert row == {
        "pair": "FFMA>R|FADD.a",
        "problem": "blind: 0% of the results depend on the value",
    }
