"""Moves of native instructions after the assembler search, with each strategy."""

from __future__ import annotations

import pytest

from nostall.gpu import Outcome, Timing
from nostall.sass import verify
from nostall.tuning.assembler.job import improve_order
from nostall.tuning.strategies import make_strategy
from tests.unit.tuning.fake_device import load_example


class FasterDevice:
    """Every changed cubin is faster, so that the search ends with a change."""

    info: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, original: bytes) -> None:
        self.original = original
        self.evaluated = 0

    def evaluate(self, cubin: bytes) -> Outcome:
        self.evaluated += 1
        factor = 1.0 if cubin == self.original else 0.9 + 1e-3 * (sum(cubin) % 7)
        return Outcome("timed", Timing((1e-5,) * 3, (1e-5 * factor,) * 3))

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        raise AssertionError("the phase decides nothing")


@pytest.mark.parametrize("native", ["anneal", "sip", "random"])
def test_a_strategy_goes_on_from_the_winner(native: str) -> None:
    source = load_example()
    device = FasterDevice(source.cubin)
    search = make_strategy(native)
    found = improve_order(source.cubin, source.kernel, device, search, 0.3, 0)
    assert device.evaluated > 10
    assert found is not None and found.cubin != source.cubin
    assert verify(source.cubin, found.cubin).safe
