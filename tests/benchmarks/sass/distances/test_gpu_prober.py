"""The part that talks to the driver, against a fake driver; and the values in its buffers."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from benchmarks.sass.distances.gpu_prober import GIB, GpuProber, harmless_slots
from benchmarks.sass.distances.microkernels.kernel import build, experiment
from benchmarks.sass.distances.microkernels.pairs import all_pairs
from benchmarks.sass.distances.microkernels.values import KINDS, SLOT_BYTES, input_values
from benchmarks.sass.distances.microkernels.windows import PASSES, THREADS, Window
from benchmarks.sass.distances.observe import Blind, Condition

from nostall.gpu.driver import Cuda
from tests.unit.gpu.fake_driver import FakeDriver, Program

PAIRS = {pair.name: pair for pair in all_pairs()}


def test_results_have_one_row_for_each_window_pass_and_thread(template: bytes) -> None:
    driver = FakeDriver()
    subject = experiment(PAIRS["IADD3>R|MOV.b"], 0, [Window(4, "stall")])
    cubin = build(template, subject)
    arguments: list[tuple[Any, ...]] = []

    def work(fake: FakeDriver, values: tuple[Any, ...]) -> None:
        arguments.append(values[2:])
        out = fake.array(values[0], 3 * PASSES * THREADS * 4, "u4").reshape(3, PASSES, THREADS, 4)
        out[..., 0] = np.arange(THREADS)
        out[..., 1] = np.arange(PASSES)[:, None]
        out[..., 2:] = (5, 6)
        inputs = fake.array(values[1], PASSES * THREADS * 4, "u4")
        assert (inputs == input_values("data", 1, 0).ravel()).all()

    driver.programs[cubin] = Program(work)
    prober = GpuProber(1, Cuda(0, driver))
    for condition in (Condition(0, 2), Condition(0, 4, 3)):
        hashes, cycles, words = prober.run(cubin, subject, condition)
        assert (words == (5, 6)).all()
        assert hashes.shape == cycles.shape == (3, PASSES, 32 * condition.warps)
        assert (hashes[1, 5] == np.arange(32 * condition.warps)).all()
        assert (cycles[2, :, 7] == np.arange(PASSES)).all()
    assert arguments == [(0, 2), (3, 4)]
    assert driver.modules == 1


def test_a_gpu_without_memory_cannot_show_upper_address_words(template: bytes) -> None:
    prober = GpuProber(1, Cuda(0, FakeDriver()))
    subject = experiment(PAIRS["IADD3>R|LDG.E.a+1:high"], 0, [])
    with pytest.raises(Blind, match="4 GiB apart"):
        prober.run(b"", subject, Condition(0, 1))


@pytest.mark.parametrize("start", [0x7F00_0000_0000, 0x7F00_7EFF_FF00, 0x7F00_FFE0_0000])
def test_slots_have_lower_words_that_are_positive_and_no_nan(start: int) -> None:
    slots = harmless_slots(start)
    assert start <= slots <= start + 2.1 * GIB
    assert (slots & 0xFFFFFFFF) + SLOT_BYTES * THREADS <= 0x7F000000


@pytest.mark.parametrize("kind", KINDS)
def test_fresh_and_stale_values_differ_and_are_harmless(kind: Any) -> None:
    slots = 0x7F12_1000_0000
    values = input_values(kind, 3, slots)
    assert values.shape == (PASSES, THREADS, 4)
    fresh, stale, fresh_high, stale_high = np.moveaxis(values, 2, 0).astype(np.int64)
    assert ((fresh != stale) | (fresh_high != stale_high)).all()
    if kind in ("uniform", "predicate", "offset", "shift"):
        assert (values.reshape(PASSES, -1, 32, 4) == values[:, ::32, None]).all()
    if kind == "predicate":
        assert set(np.unique(values[..., :2])) == {0, 1}
    if kind.startswith("global"):
        own = slots + np.arange(THREADS) * SLOT_BYTES
        for low, high in ((fresh, fresh_high), (stale, stale_high)):
            assert set(np.unique((high << 32) + low - own) % (4 * GIB)) <= {0, 16}
    if kind == "shift":
        assert values.max() < 32
    if kind == "magnitude":
        assert ((values.view(np.float32) >= 8) & (values.view(np.float32) < 1 << 22)).all()
    if kind == "exponent":
        assert set(np.unique(values[..., :2] >> 28)) == set(range(1, 7))
    if kind in ("data", "magnitude", "exponent"):
        low, high = (int(x) for x in (values[0, 0, 0], values[0, 0, 2]))
        assert np.isfinite(struct.unpack("<d", struct.pack("<II", low, high))[0])
        assert np.isfinite(values.view(np.float16).astype(np.float32)).all()
        assert np.isfinite(values.view(np.float32)).all()
