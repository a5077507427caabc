"""Measurements and the verdict of a comparison."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nostall.core import Comparison, ContractBroken, Measurement

FINITE = st.floats(min_value=0, max_value=1e6)


@given(st.lists(FINITE, min_size=1, max_size=9))
def test_value_is_the_median(samples):
    assert Measurement("s", tuple(samples), "measured").value == float(np.median(samples))


def test_a_failure_has_infinite_cost_and_a_reason():
    failed = Measurement("s", (), "measured", failure="illegal address")
    assert failed.value == math.inf
    assert str(failed) == "failed (illegal address)"


def test_modelled_numbers_are_printed_as_modelled():
    assert str(Measurement("cycles", (12.0,), "modelled")) == "modelled 12 cycles"
    assert str(Measurement("s", (0.5,), "measured")) == "0.5 s"


@pytest.mark.parametrize("samples", [(), (math.nan,), (math.inf,), (-1.0,), (1.0, -0.5)])
def test_invalid_samples_are_rejected(samples):
    with pytest.raises(ContractBroken):
        Measurement("s", samples, "measured")


@given(
    st.lists(st.floats(0.9, 1.1), min_size=5, max_size=30),
    st.floats(min_value=1.5, max_value=4.0),
)
def test_a_large_gain_is_faster_and_its_inverse_slower(candidate, factor):
    original = [factor * sample for sample in candidate]
    gain = Comparison.from_samples(original, candidate, original, kind="measured", resamples=200)
    assert gain.verdict == "faster"
    assert gain.low <= gain.ratio <= gain.high
    loss = Comparison.from_samples(candidate, original, candidate, kind="measured", resamples=200)
    assert loss.verdict == "slower"
    assert loss.ratio == pytest.approx(1 / gain.ratio)


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=20))
def test_equal_samples_compare_as_same(samples):
    null = Comparison.from_samples(samples, samples, samples, kind="measured", resamples=200)
    assert null.verdict == "same"
    assert null.ratio == 1.0


@pytest.mark.parametrize(
    ("low", "high", "null_low", "null_high", "verdict"),
    [
        (1.02, 1.2, 0.99, 1.01, "faster"),
        (1.01, 1.2, 0.99, 1.01, "same"),  # touches the null
        (1.005, 1.2, 0.9, 0.95, "faster"),
        (1.0, 1.2, 0.9, 0.95, "same"),  # touches 1
        (0.97, 1.2, 0.9, 0.95, "same"),  # above the null, and not above 1
        (0.5, 0.98, 0.99, 1.01, "slower"),
        (0.5, 0.99, 0.99, 1.01, "same"),
        (0.5, 1.0, 1.05, 1.1, "same"),
        (0.5, 0.999, 1.05, 1.1, "slower"),
        (0.5, 1.5, 1.0, 1.0, "same"),
    ],
)
def test_the_verdict_needs_the_whole_interval_beyond_1_and_beyond_the_null(
    low: float, high: float, null_low: float, null_high: float, verdict: str
) -> None:
    compared = Comparison((low + high) / 2, low, high, null_low, null_high, "measured")
    assert compared.verdict == verdict


def test_the_interval_holds_95_percent_of_the_resampled_medians() -> None:
    """With one of two ratios for each sample, a median is one of them, or their mean."""
    original = [1.0] * 20 + [3.0] * 20
    compared = Comparison.from_samples(original, [1.0] * 40, kind="measured")
    assert (compared.low, compared.high) == (1.0, 3.0)
    # The median of 9 samples, of which 1 is large, is large in 0.1 % of the resamples.
    one = Comparison.from_samples([1.0] * 8 + [3.0], [1.0] * 9, kind="measured")
    assert (one.ratio, one.low, one.high) == (1.0, 1.0, 1.0)
    # With 3 of 9 large, it is large in about 14 %, and one of the two ends is.
    three = Comparison.from_samples([1.0] * 6 + [3.0] * 3, [1.0] * 9, kind="measured")
    assert (three.ratio, three.low, three.high) == (1.0, 1.0, 3.0)


def test_the_null_compares_the_original_with_itself() -> None:
    compared = Comparison.from_samples([2.0] * 5, [1.0] * 5, [1.6] * 5, kind="measured")
    assert (compared.ratio, compared.low, compared.high) == (2.0, 2.0, 2.0)
    assert (compared.null_low, compared.null_high) == (1.25, 1.25)
    assert compared.verdict == "faster"
    alone = Comparison.from_samples([2.0], [1.0], kind="modelled")
    assert (alone.null_low, alone.null_high, alone.kind) == (1.0, 1.0, "modelled")


def test_a_gain_within_the_null_interval_is_same():
    # The original against itself shows +5 %, so +3 % proves nothing.
    original = [1.03] * 20
    same = Comparison.from_samples(original, [1.0] * 20, [0.98] * 20, kind="measured")
    assert same.low > 1
    assert same.verdict == "same"


def test_modelled_samples_have_no_noise():
    assert Comparison.from_samples([1.001], [1.0], kind="modelled").verdict == "faster"


def test_the_interval_is_deterministic():
    rng = np.random.default_rng(1)
    a, b = rng.normal(1, 0.1, 40).tolist(), rng.normal(1, 0.1, 40).tolist()
    first, second = (Comparison.from_samples(a, b, kind="measured", seed=3) for _ in range(2))
    assert first == second
    assert first.low < first.ratio < first.high
    assert first.verdict == "same"


@pytest.mark.parametrize(("original", "candidate"), [([], []), ([1.0], [1.0, 2.0])])
def test_unpaired_samples_are_rejected(original, candidate):
    with pytest.raises(ContractBroken, match="equal numbers"):
        Comparison.from_samples(original, candidate, kind="measured")


def _compare_loads(rng: np.random.Generator, loads: int, rounds: int, gain: float) -> Comparison:
    """Compare samples with little noise, whose loads differ by up to half a percent."""
    per = rounds // loads
    original, candidate, null = (
        np.repeat(1 + 0.0025 * rng.uniform(-1, 1, loads), per)
        * (1 + 2e-4 * rng.normal(size=rounds))
        for _ in range(3)
    )
    return Comparison.from_samples(
        tuple(original),
        tuple(candidate / gain),
        tuple(null),
        kind="measured",
        loads=loads,
        resamples=200,
    )


def test_the_address_of_a_module_is_no_gain() -> None:
    """With one load the effect of the address looks like a gain; with several it does not."""
    rng = np.random.default_rng(0)
    single = [_compare_loads(rng, 1, 48, 1.0) for _ in range(60)]
    several = [_compare_loads(rng, 8, 48, 1.0) for _ in range(60)]
    excluded = [sum(not c.low <= 1 <= c.high for c in group) for group in (single, several)]
    assert excluded[0] > 45 and excluded[1] < 14
    assert sum(c.verdict == "faster" for c in several) <= 5
    assert sum(c.verdict == "faster" for c in single) > 8


def test_a_gain_larger_than_the_effect_of_addresses_is_faster() -> None:
    rng = np.random.default_rng(1)
    assert all(_compare_loads(rng, 8, 48, 1.02).verdict == "faster" for _ in range(20))


def test_loads_with_unequal_numbers_of_samples() -> None:
    compared = Comparison.from_samples((2.0,) * 7, (1.0,) * 7, (2.0,) * 7, kind="measured", loads=3)
    assert (compared.ratio, compared.low, compared.high) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("loads", [0, 8])
def test_loads_without_samples_are_rejected(loads: int) -> None:
    with pytest.raises(ContractBroken, match="samples of"):
        Comparison.from_samples((1.0,) * 7, (1.0,) * 7, kind="measured", loads=loads)
