"""Tests of the Philox random numbers: known answers, order of elements, uniformity."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tools.interpreters.reference import interpret

from nostall.fusion import BadGraph, Builder

INDUCTOR_SCALE, SCALE = np.float32(4.6566127342e-10), np.float32(2.3283062977608182e-10)
KNOWN_ANSWER = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
"""Words of Philox 4x32-10 for counter 0 and key 0, from the Random123 library."""
SEEDS = (0, -1, 2**63 - 1, -(2**63), 1234567890123)


def uniform(
    seed: int, shape: tuple[int, ...], dtype: str = "float32", words: int = 4
) -> np.ndarray:
    build = Builder()
    numbers = build("random", build.input((1,), "int64"), shape=shape, dtype=dtype, words=words)
    (result,) = interpret(build.graph(numbers), [np.array([seed])])
    return result


def test_first_numbers_are_the_known_answer() -> None:
    assert uniform(0, (1,), words=1)[0] == np.float32(KNOWN_ANSWER[0]) * INDUCTOR_SCALE
    assert (uniform(0, (4,)) == np.array(KNOWN_ANSWER).astype(np.float32) * SCALE).all()
    halves = [half for word in KNOWN_ANSWER for half in (word & 0xFFFF, word >> 16)]
    assert (uniform(0, (8,), words=8) == (np.array(halves) + 0.5) / 65536).all()


@pytest.mark.parametrize("shape", [(3, 8), (3, 5), (3, 1), (7,), (2, 3, 6)])
def test_four_adjacent_elements_are_the_words_of_one_counter(shape: tuple[int, ...]) -> None:
    counters = -(-math.prod(shape) // 4)
    words = uniform(5, (counters, 4)).ravel()
    assert (uniform(5, shape).ravel() == words[: math.prod(shape)]).all()
    # Inductor uses the first word of each counter and folds it around 1/2.
    folded = 2 * np.minimum(words[::4], 1 - words[::4])
    assert np.allclose(uniform(5, (counters,), words=1), folded, rtol=0, atol=2e-7)


@pytest.mark.parametrize("shape", [(3, 8), (3, 5), (3, 1), (7,), (2, 3, 6)])
def test_eight_adjacent_elements_are_the_halves_of_one_counter(shape: tuple[int, ...]) -> None:
    numbers = uniform(5, shape, words=8).ravel()
    full = uniform(5, (-(-len(numbers) // 8), 8), words=8).ravel()
    assert (numbers == full[: len(numbers)]).all()
    assert (numbers * 65536 % 1 == 0.5).all()
    # The upper half has the leading bits of a word, so it is close to the number of 32 bits.
    words = uniform(5, (4 * len(full) // 8,))
    assert np.abs(full[1::2] - words).max() <= 2**-17 + 2**-24


def test_eager_numbers_equal_the_reference() -> None:
    torch = pytest.importorskip("torch")
    from nostall.fusion.codegen.runtime.eager import uniform_numbers

    for words in (1, 4, 8):
        for seed in SEEDS:
            for shape in ((7, 11), (2, 3, 8), (5,)):
                for dtype in ("float32", "float16", "bfloat16"):
                    numbers = uniform_numbers(
                        torch.tensor([seed]), shape, getattr(torch, dtype), words
                    )
                    expected = torch.from_numpy(uniform(seed, shape, dtype, words)).to(
                        numbers.dtype
                    )
                    assert torch.equal(numbers, expected)
    empty = uniform_numbers(torch.tensor([1]), (3, 0), torch.float32, words=4)
    assert empty.shape == (3, 0)


def test_largest_word_gives_a_number_below_one() -> None:
    assert np.float32(2**32 - 1) == 2**32  # rounded
    assert np.float32(2**32 - 1) * SCALE == np.nextafter(np.float32(1), np.float32(0))


@pytest.mark.parametrize("words", [1, 4, 8])
@pytest.mark.parametrize("shape", [(100, 200), (200, 99)])
def test_numbers_are_uniform_and_below_one(shape: tuple[int, int], words: int) -> None:
    numbers = uniform(99, shape, "float16", words)
    assert numbers.min() >= 0 and numbers.max() < 1
    share = numbers.size / 20
    for part in (numbers, *(numbers[:, place::8] for place in range(8))):
        counts, _ = np.histogram(part, bins=20, range=(0, 1))
        assert np.abs(counts - part.size / 20).max() < 6 * share**0.5
        for p in (0.1, 0.25, 0.5):
            deviation = abs((part < p).mean() - p) * part.size**0.5
            assert deviation < 5 * (p * (1 - p)) ** 0.5
    flat = numbers.ravel()
    for distance in (1, 2, 3, 4, 7, 8, shape[1]):
        assert abs(np.corrcoef(flat[:-distance], flat[distance:])[0, 1]) < 6 / len(flat) ** 0.5


def test_invalid_seeds_and_words_are_rejected() -> None:
    build = Builder()
    with pytest.raises(BadGraph, match="random"):
        build("random", build.input((2,), "int64"), shape=(4,), dtype="float32", words=4)
    with pytest.raises(BadGraph, match="random"):
        build("random", build.input((1,), "int64"), shape=(4,), dtype="float32", words=2)
