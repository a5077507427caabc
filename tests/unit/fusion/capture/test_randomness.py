"""Random numbers of kernels: Philox, as its authors define it; which one an element takes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nostall.fusion import BadGraph, Builder
from nostall.fusion.testing.reference import interpret

INDUCTORS_SCALE, SCALE = np.float32(4.6566127342e-10), np.float32(2.3283062977608182e-10)
KNOWN = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
"""Random123's answer for Philox 4x32-10 with counter 0 and key 0."""
SEEDS = (0, -1, 2**63 - 1, -(2**63), 1234567890123)


def uniform(
    seed: int, shape: tuple[int, ...], dtype: str = "float32", words: int = 4
) -> np.ndarray:
    build = Builder()
    drawn = build("random", build.input((1,), "int64"), shape=shape, dtype=dtype, words=words)
    (found,) = interpret(build.graph(drawn), [np.array([seed])])
    return found


def test_the_first_numbers_are_the_known_answer() -> None:
    assert uniform(0, (1,), words=1)[0] == np.float32(KNOWN[0]) * INDUCTORS_SCALE
    assert (uniform(0, (4,)) == np.array(KNOWN).astype(np.float32) * SCALE).all()
    halves = [half for word in KNOWN for half in (word & 0xFFFF, word >> 16)]
    assert (uniform(0, (8,), words=8) == (np.array(halves) + 0.5) / 65536).all()


@pytest.mark.parametrize("shape", [(3, 8), (3, 5), (3, 1), (7,), (2, 3, 6)])
def test_four_neighbours_are_the_words_of_one_counter(shape: tuple[int, ...]) -> None:
    counters = -(-math.prod(shape) // 4)
    words = uniform(5, (counters, 4)).ravel()
    assert (uniform(5, shape).ravel() == words[: math.prod(shape)]).all()
    # The first word is the one that Inductor takes, and folds around 1/2.
    folded = 2 * np.minimum(words[::4], 1 - words[::4])
    assert np.allclose(uniform(5, (counters,), words=1), folded, rtol=0, atol=2e-7)


@pytest.mark.parametrize("shape", [(3, 8), (3, 5), (3, 1), (7,), (2, 3, 6)])
def test_eight_neighbours_are_the_halves_of_one_counter(shape: tuple[int, ...]) -> None:
    found = uniform(5, shape, words=8).ravel()
    whole = uniform(5, (-(-len(found) // 8), 8), words=8).ravel()
    assert (found == whole[: len(found)]).all()
    assert (found * 65536 % 1 == 0.5).all()
    # The upper half is how a word begins, up to what fp32 rounds off.
    words = uniform(5, (4 * len(whole) // 8,))
    assert np.abs(whole[1::2] - words).max() <= 2**-17 + 2**-24


def test_pytorch_gives_the_same_numbers() -> None:
    torch = pytest.importorskip("torch")
    from nostall.fusion.codegen.runtime.eager import uniform_numbers

    for words in (1, 4, 8):
        for seed in SEEDS:
            for shape in ((7, 11), (2, 3, 8), (5,)):
                for dtype in ("float32", "float16", "bfloat16"):
                    made = uniform_numbers(
                        torch.tensor([seed]), shape, getattr(torch, dtype), words
                    )
                    expected = torch.from_numpy(uniform(seed, shape, dtype, words)).to(made.dtype)
                    assert torch.equal(made, expected)
    empty = uniform_numbers(torch.tensor([1]), (3, 0), torch.float32, words=4)
    assert empty.shape == (3, 0)


def test_the_largest_word_is_below_one() -> None:
    assert np.float32(2**32 - 1) == 2**32  # rounded
    assert np.float32(2**32 - 1) * SCALE == np.nextafter(np.float32(1), np.float32(0))


@pytest.mark.parametrize("words", [1, 4, 8])
@pytest.mark.parametrize("shape", [(100, 200), (200, 99)])
def test_numbers_are_uniform_and_below_one(shape: tuple[int, int], words: int) -> None:
    found = uniform(99, shape, "float16", words)
    assert found.min() >= 0 and found.max() < 1
    share = found.size / 20
    for part in (found, *(found[:, place::8] for place in range(8))):
        counts, _ = np.histogram(part, bins=20, range=(0, 1))
        assert np.abs(counts - part.size / 20).max() < 6 * share**0.5
        for dropped in (0.1, 0.25, 0.5):
            far = abs((part < dropped).mean() - dropped) * part.size**0.5
            assert far < 5 * (dropped * (1 - dropped)) ** 0.5
    flat = found.ravel()
    for apart in (1, 2, 3, 4, 7, 8, shape[1]):
        assert abs(np.corrcoef(flat[:-apart], flat[apart:])[0, 1]) < 6 / len(flat) ** 0.5


def test_a_seed_is_one_number_and_words_are_one_four_or_eight() -> None:
    build = Builder()
    with pytest.raises(BadGraph, match="random"):
        build("random", build.input((2,), "int64"), shape=(4,), dtype="float32", words=4)
    with pytest.raises(BadGraph, match="random"):
        build("random", build.input((1,), "int64"), shape=(4,), dtype="float32", words=2)
