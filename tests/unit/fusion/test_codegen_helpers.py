"""Functions that kernels call, run here with numpy in place of Triton, in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from nostall.fusion.codegen.helpers import HELPERS

Function = Callable[[NDArray[np.float32]], NDArray[np.float32]]


def helper(name: str) -> Function:
    """numpy's minimum and maximum propagate NaN; numbers in the text become fp32 with arrays."""
    nan = SimpleNamespace(ALL=None)
    tl = SimpleNamespace(
        PropagateNan=nan,
        minimum=lambda a, b, propagate_nan=None: np.minimum(a, np.float32(b)),
        maximum=lambda a, b, propagate_nan=None: np.maximum(a, np.float32(b)),
    )
    libdevice = SimpleNamespace(fast_dividef=np.divide, fast_expf=np.exp)
    names: dict[str, object] = {"tl": tl, "libdevice": libdevice}
    exec(HELPERS[name].replace("@triton.jit\n", ""), names)
    found = names[name]
    assert callable(found)
    return found


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
