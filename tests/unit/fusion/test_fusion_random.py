"""Random numbers of kernels: Philox, as its authors define it."""

from __future__ import annotations

import numpy as np
import pytest

from nostall.fusion import BadGraph, Builder
from nostall.fusion.reference import interpret

SCALE = 4.6566127342e-10


def uniform(seed: int, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    build = Builder()
    graph = build.graph(build("random", build.input((1,), "int64"), shape=shape, dtype=dtype))
    (found,) = interpret(graph, [np.array([seed])])
    return found


def test_the_first_number_is_the_known_answer() -> None:
    """Random123's vector for Philox 4x32-10 with counter 0 and key 0 begins with 6627e8d5."""
    assert uniform(0, (1,))[0] == np.float32(0x6627E8D5) * np.float32(SCALE)


def test_pytorch_gives_the_same_numbers() -> None:
    torch = pytest.importorskip("torch")
    from nostall.fusion.codegen.eager import uniform_numbers

    for seed in (0, -1, 2**63 - 1, -(2**63), 1234567890123):
        for dtype in ("float32", "float16", "bfloat16"):
            made = uniform_numbers(torch.tensor([seed]), (7, 11), getattr(torch, dtype))
            expected = torch.from_numpy(uniform(seed, (7, 11), dtype)).to(made.dtype)
            assert torch.equal(made, expected)


def test_numbers_are_uniform_and_below_one() -> None:
    found = uniform(99, (100, 200), "float16").ravel()
    assert found.min() >= 0 and found.max() < 1
    counts, _ = np.histogram(found, bins=20, range=(0, 1))
    assert np.abs(counts - 1000).max() < 6 * 1000**0.5
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 6 / len(found) ** 0.5


def test_a_seed_is_one_number() -> None:
    build = Builder()
    with pytest.raises(BadGraph, match="random"):
        build("random", build.input((2,), "int64"), shape=(4,), dtype="float32")
