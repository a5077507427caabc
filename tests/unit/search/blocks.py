"""A space of two blocks with a portfolio, and a pipeline that reverses its order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nostall.core import Measurement
from nostall.search.orders.operators import GIVEN, Proposal
from nostall.search.orders.pipeline import Finished
from nostall.testing import Disorder, Permutations

Order = tuple[int, ...]


class Blocks(Permutations):
    """Permutations with two blocks (halves), re-ordering and a portfolio."""

    def reorder(
        self,
        state: Order,
        rng: np.random.Generator,
        sigma: float,
        blocks: Sequence[int] | None = None,
    ) -> Order:
        half = self.size // 2
        parts = [state[:half], state[half:]]
        for number in (0, 1) if blocks is None else blocks:
            part = parts[number]
            keys = np.arange(len(part)) + rng.normal(0, sigma, len(part))
            parts[number] = tuple(part[i] for i in np.argsort(keys))
        return (*parts[0], *parts[1])

    def portfolio(self) -> list[Order]:
        a, b, c, d, e, f, g, h = self.start()
        return [(d, c, b, a, e, f, g, h), (a, b, c, d, h, f, g, e), (b, a, c, d, e, f, g, h)]

    def combine(self, first: Order, second: Order) -> Order | None:
        start = self.start()
        if first == second:
            return None
        mixed = [a if a != s else b for s, a, b in zip(start, first, second, strict=True)]
        return tuple(mixed)


class Backwards(Disorder):
    """A measured objective with noise; the best state has both halves in ascending order.

    It finishes what it holds in reverse order.
    """

    kind = "measured"
    capacity = 5

    def __init__(self, space: Blocks, wrong: Sequence[Order] = ()) -> None:
        super().__init__()
        self.space, self.wrong = space, set(wrong)
        self.rng = np.random.default_rng(1)
        self.waiting: list[tuple[int, Proposal[Order]]] = []
        self.ready: list[tuple[int, Proposal[Order]]] = []
        self.target = (*sorted(space.start()[:4]), *sorted(space.start()[4:]))
        self.most = 0
        self.measured: list[Order] = []
        self.discarded = False

    @property
    def idle(self) -> bool:
        return len(self.waiting) + len(self.ready) < 2

    def submit(self, number: int, proposal: Proposal[Order]) -> None:
        self.waiting.append((number, proposal))
        self.most = max(self.most, len(self.waiting) + len(self.ready))

    def collect(self) -> Finished[Order]:
        if not self.ready:
            self.ready, self.waiting = self.waiting, self.ready
        number, proposal = self.ready.pop()
        state = proposal.realize(self.space)
        if state in self.wrong:
            failed = Measurement("s", (), "measured", failure="wrong: outputs differ")
            return Finished(number, state, failed)
        if state in self.measured and proposal.operator is not GIVEN:
            return Finished(number, state, None, "duplicate")
        self.measured.append(state)
        noise = 1 + 0.01 * self.rng.normal()
        return Finished(number, state, Measurement("s", (self._seconds(state) * noise,), self.kind))

    def _seconds(self, state: Order) -> float:
        return self.optimum * (10 + sum(a != b for a, b in zip(state, self.target, strict=True)))

    def discard(self) -> None:
        self.waiting.clear()
        self.ready.clear()
        self.discarded = True
