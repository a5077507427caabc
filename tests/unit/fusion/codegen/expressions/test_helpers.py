"""Accuracy of the helper functions of kernels, run with numpy in place of Triton, in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from nostall.fusion.codegen.expressions.helpers import used_helpers

Function = Callable[[NDArray[np.float32]], NDArray[np.float32]]


SPECIAL_VALUES = np.array(
    [np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-40, -1e-40, 0.0, -0.0], np.float32
)


def helper(name: str, exp_off: float = 0.0, reciprocal_off: float = 0.0) -> Function:
    """A helper function, executed by numpy.

    numpy's minimum and maximum propagate NaN, and Python numbers become fp32 in operations with
    fp32 arrays.  ``exp_off``, ``reciprocal_off``: relative errors of the instructions.
    """
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
    function = names[name]
    assert callable(function)
    return function


def sample_points(largest: float) -> NDArray[np.float32]:
    """Numbers of both signs: dense up to ``largest``, and small ones of all magnitudes."""
    small = np.geomspace(1e-30, largest, 50_000)
    dense = np.linspace(-largest, largest, 200_001)
    return np.concatenate([dense, small, -small]).astype(np.float32)


def test_erf_is_accurate_to_a_few_bits() -> None:
    x = np.concatenate(
        [np.linspace(-6, 6, 200_001), np.geomspace(1e-30, 4, 50_000), [0.0, -0.0]]
    ).astype(np.float32)
    actual = helper("_erf")(x)
    assert actual.dtype == np.float32
    expected = np.array([math.erf(float(v)) for v in x])
    error = abs(actual.astype(np.float64) - expected)
    assert (error <= 6e-7 * abs(expected)).all()
    assert abs(actual).max() == 1.0


def test_erf_saturates_at_one_and_propagates_nan() -> None:
    with np.errstate(over="ignore"):
        x = np.array([np.inf, -np.inf, 3e38, -1e20, 4.5, np.nan], np.float32)
        actual = helper("_erf")(x)
    assert actual[:5].tolist() == [1.0, -1.0, 1.0, -1.0, 1.0] and np.isnan(actual[5])


def test_sigmoid_saturates_at_zero_and_one() -> None:
    with np.errstate(over="ignore"):
        x = np.array([np.inf, -np.inf, 100, -100, 0, np.nan], np.float32)
        actual = helper("_sigmoid")(x)
        assert actual[:5].tolist() == pytest.approx([1, 0, 1, 0, 0.5]) and np.isnan(actual[5])
        x = np.linspace(-80, 80, 10_001).astype(np.float32)
        expected = 1 / (1 + np.exp(-x.astype(np.float64)))
        assert abs(helper("_sigmoid")(x) / expected - 1).max() < 1e-5


def test_tanh_is_accurate_to_a_few_bits() -> None:
    x = sample_points(50)
    with np.errstate(over="ignore", divide="ignore"):
        actual, expected = helper("_tanh")(x), np.tanh(x.astype(np.float64))
        special = helper("_tanh")(SPECIAL_VALUES)
    assert actual.dtype == np.float32
    assert (abs(actual - expected) <= 4e-7 * abs(expected)).all()
    assert abs(actual).max() == 1.0
    assert np.isnan(special[0]) and special[1:5].tolist() == [1, -1, 1, -1]
    assert special[5:].tolist() == SPECIAL_VALUES[5:].tolist()
    assert np.signbit(special).tolist()[1:] == np.signbit(SPECIAL_VALUES).tolist()[1:]


@pytest.mark.parametrize(
    ("name", "exact", "error"),
    [
        ("_tanh_plus_1", lambda x: 2 / (1 + math.exp(min(-2 * x, 700.0))), 2e-7),
        ("_erf_plus_1", lambda x: math.erfc(-x), 2.5e-7),
    ],
)
def test_functions_plus_one_are_accurate(
    name: str, exact: Callable[[float], float], error: float
) -> None:
    x = sample_points(50)
    with np.errstate(over="ignore"):
        actual, special = helper(name)(x), helper(name)(SPECIAL_VALUES)
    expected = np.array([exact(float(v)) for v in x])
    assert actual.dtype == np.float32
    assert abs(actual - expected).max() <= error
    # The sum is never below 0 or above 2, so a product with it has the right sign.
    assert actual.min() == 0.0 and actual.max() == 2.0
    assert np.isnan(special[0]) and special[1:].tolist() == [2, 0, 2, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("exp_off", [-(2**-22), 2**-22])
@pytest.mark.parametrize("reciprocal_off", [-(2**-23), 2**-23])
def test_error_bounds_hold_with_the_maximum_error_of_instructions(
    exp_off: float, reciprocal_off: float
) -> None:
    """exp2 may be off by 2 units in the last place of a number near 1, a reciprocal by 1."""
    x = sample_points(9)
    wide = x.astype(np.float64)
    names = ("_tanh", "_tanh_plus_1", "_erf_plus_1")
    with np.errstate(over="ignore"):
        tanh, tanh_plus_1, erf_plus_1 = (helper(n, exp_off, reciprocal_off)(x) for n in names)
    assert (abs(tanh - np.tanh(wide)) <= 1e-6 * abs(np.tanh(wide))).all()
    assert abs(tanh_plus_1 - 2 / (1 + np.exp(-2 * wide))).max() <= 5e-7
    assert abs(erf_plus_1 - [math.erfc(-v) for v in wide]).max() <= 6e-7


def test_tanh_plus_one_keeps_its_digits() -> None:
    """An fp32 addition cancels them: at x = -8, PyTorch's 1 + tanh(x) is off by a quarter."""
    x = np.linspace(-20, 0, 100_001).astype(np.float32)
    expected = 2 / (1 + np.exp(-2 * x.astype(np.float64)))
    assert abs(helper("_tanh_plus_1")(x) / expected - 1).max() < 3e-6


@pytest.mark.parametrize(("name", "torch_name"), [("_tanh", "tanh"), ("_erf", "erf")])
def test_special_values_give_the_results_of_pytorch(name: str, torch_name: str) -> None:
    torch = pytest.importorskip("torch")
    x = np.append(SPECIAL_VALUES, np.float32([1e20, -1e20, 20, -20, 0.45, -0.45]))
    expected = getattr(torch, torch_name)(torch.from_numpy(x)).numpy()
    with np.errstate(over="ignore", divide="ignore", under="ignore"):
        np.testing.assert_allclose(helper(name)(x), expected, rtol=6e-7, atol=2e-38)
        np.testing.assert_allclose(helper(f"{name}_plus_1")(x), 1 + expected, rtol=0, atol=2.5e-7)
