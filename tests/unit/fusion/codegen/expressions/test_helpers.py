"""Functions that kernels call, run here with numpy in place of Triton, in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from nostall.fusion.codegen.expressions.helpers import used_helpers

Function = Callable[[NDArray[np.float32]], NDArray[np.float32]]


STRANGE = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-40, -1e-40, 0.0, -0.0], np.float32)


def helper(name: str, exp_off: float = 0.0, reciprocal_off: float = 0.0) -> Function:
    """numpy's minimum and maximum propagate NaN; numbers in the text become fp32 with arrays.  The
    instructions of a GPU are off by as much of the value as is said here."""
    nan = SimpleNamespace(ALL=None)
    off, inverse_off = np.float32(1 + exp_off), np.float32(1 + reciprocal_off)
    tl = SimpleNamespace(
        PropagateNan=nan,
        float32=np.float32,
        abs=np.abs,
        exp2=lambda x: np.exp2(x) * off,
        where=np.where,
        minimum=lambda a, b, propagate_nan=None: np.minimum(a, np.float32(b)),
        maximum=lambda a, b, propagate_nan=None: np.maximum(a, np.float32(b)),
        inline_asm_elementwise=lambda _, __, x, **___: np.reciprocal(x[0]) * inverse_off,
    )
    libdevice = SimpleNamespace(fast_dividef=np.divide, fast_expf=np.exp)
    names: dict[str, object] = {"tl": tl, "libdevice": libdevice}
    for text in used_helpers(f"{name}("):
        exec(text.replace("@triton.jit\n", ""), names)
    found = names[name]
    assert callable(found)
    return found


def everywhere(largest: float) -> NDArray[np.float32]:
    """Numbers of both signs: dense up to ``largest``, and small ones of all sizes."""
    small = np.geomspace(1e-30, largest, 50_000)
    dense = np.linspace(-largest, largest, 200_001)
    return np.concatenate([dense, small, -small]).astype(np.float32)


def test_erf_is_right_to_a_few_bits_everywhere() -> None:
    x = np.concatenate(
        [np.linspace(-6, 6, 200_001), np.geomspace(1e-30, 4, 50_000), [0.0, -0.0]]
    ).astype(np.float32)
    got = helper("_erf")(x)
    assert got.dtype == np.float32
    want = np.array([math.erf(float(v)) for v in x])
    error = abs(got.astype(np.float64) - want)
    assert (error <= 6e-7 * abs(want)).all()
    assert abs(got).max() == 1.0


def test_erf_ends_at_one_and_keeps_what_is_no_number() -> None:
    with np.errstate(over="ignore"):
        x = np.array([np.inf, -np.inf, 3e38, -1e20, 4.5, np.nan], np.float32)
        got = helper("_erf")(x)
    assert got[:5].tolist() == [1.0, -1.0, 1.0, -1.0, 1.0] and np.isnan(got[5])


def test_sigmoid_ends_at_zero_and_one() -> None:
    with np.errstate(over="ignore"):
        x = np.array([np.inf, -np.inf, 100, -100, 0, np.nan], np.float32)
        got = helper("_sigmoid")(x)
        assert got[:5].tolist() == pytest.approx([1, 0, 1, 0, 0.5]) and np.isnan(got[5])
        x = np.linspace(-80, 80, 10_001).astype(np.float32)
        want = 1 / (1 + np.exp(-x.astype(np.float64)))
        assert abs(helper("_sigmoid")(x) / want - 1).max() < 1e-5


def test_tanh_is_right_to_a_few_bits_everywhere() -> None:
    x = everywhere(50)
    with np.errstate(over="ignore", divide="ignore"):
        got, want = helper("_tanh")(x), np.tanh(x.astype(np.float64))
        strange = helper("_tanh")(STRANGE)
    assert got.dtype == np.float32
    assert (abs(got - want) <= 4e-7 * abs(want)).all()
    assert abs(got).max() == 1.0
    assert np.isnan(strange[0]) and strange[1:5].tolist() == [1, -1, 1, -1]
    assert strange[5:].tolist() == STRANGE[5:].tolist()
    assert np.signbit(strange).tolist()[1:] == np.signbit(STRANGE).tolist()[1:]


@pytest.mark.parametrize(
    ("name", "exact", "error"),
    [
        ("_tanh_plus_1", lambda x: 2 / (1 + math.exp(min(-2 * x, 700.0))), 2e-7),
        ("_erf_plus_1", lambda x: math.erfc(-x), 2.5e-7),
    ],
)
def test_one_is_added_without_cases(
    name: str, exact: Callable[[float], float], error: float
) -> None:
    x = everywhere(50)
    with np.errstate(over="ignore"):
        got, strange = helper(name)(x), helper(name)(STRANGE)
    want = np.array([exact(float(v)) for v in x])
    assert got.dtype == np.float32
    assert abs(got - want).max() <= error
    # Nowhere is it below 0 or above 2, so what is multiplied with it has the right sign.
    assert got.min() == 0.0 and got.max() == 2.0
    assert np.isnan(strange[0]) and strange[1:].tolist() == [2, 0, 2, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("exp_off", [-(2**-22), 2**-22])
@pytest.mark.parametrize("reciprocal_off", [-(2**-23), 2**-23])
def test_instructions_that_are_off_by_the_most_they_may_be(
    exp_off: float, reciprocal_off: float
) -> None:
    """exp2 by 2 units in the last place of a number near 1, a reciprocal by 1."""
    x = everywhere(9)
    wide = x.astype(np.float64)
    names = ("_tanh", "_tanh_plus_1", "_erf_plus_1")
    with np.errstate(over="ignore"):
        tanh, tanh_plus_1, erf_plus_1 = (helper(n, exp_off, reciprocal_off)(x) for n in names)
    assert (abs(tanh - np.tanh(wide)) <= 1e-6 * abs(np.tanh(wide))).all()
    assert abs(tanh_plus_1 - 2 / (1 + np.exp(-2 * wide))).max() <= 5e-7
    assert abs(erf_plus_1 - [math.erfc(-v) for v in wide]).max() <= 6e-7


def test_tanh_plus_one_keeps_its_digits() -> None:
    """Where fp32 has 1 + tanh(x) to 1 digit: PyTorch's own sum is off by a quarter at -8."""
    x = np.linspace(-20, 0, 100_001).astype(np.float32)
    want = 2 / (1 + np.exp(-2 * x.astype(np.float64)))
    assert abs(helper("_tanh_plus_1")(x) / want - 1).max() < 3e-6


@pytest.mark.parametrize(("name", "of"), [("_tanh", "tanh"), ("_erf", "erf")])
def test_strange_numbers_give_what_pytorch_gives(name: str, of: str) -> None:
    torch = pytest.importorskip("torch")
    x = np.append(STRANGE, np.float32([1e20, -1e20, 20, -20, 0.45, -0.45]))
    theirs = getattr(torch, of)(torch.from_numpy(x)).numpy()
    with np.errstate(over="ignore", divide="ignore", under="ignore"):
        np.testing.assert_allclose(helper(name)(x), theirs, rtol=6e-7, atol=2e-38)
        np.testing.assert_allclose(helper(f"{name}_plus_1")(x), 1 + theirs, rtol=0, atol=2.5e-7)
