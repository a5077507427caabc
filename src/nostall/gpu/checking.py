"""Does a candidate compute what the original does?  Sample after sample, on the device.

A *sample* is one set of fresh random inputs: the original runs on it, then the candidate, and all
output buffers are compared.  Before each run outputs are poisoned, with another byte for the
candidate than for the original.  The first samples run one by one, the original twice (it must
repeat itself) and the candidate's very first launch with a cold L2 cache; the rest runs as a CUDA
graph that makes its own inputs, so that nothing waits for the host.
"""

from __future__ import annotations

from typing import Any

from nostall.core.errors import BadInput
from nostall.core.launch import LaunchSpec
from nostall.gpu.buffers import Buffers
from nostall.gpu.device import Plan
from nostall.gpu.driver import Arguments, Cuda, Loaded
from nostall.gpu.timing import Flush

CAREFUL = 16
"""Samples that are looked at one by one."""
_PER_GRAPH = 16
CHECKS, SEARCH = 1 << 40, 0
"""Where the numbers of samples begin: those of checks, and those kept during a search."""


class Checker:
    """Runs one launch of the kernel on random inputs and compares."""

    def __init__(
        self, cuda: Cuda, name: str, launch: LaunchSpec, sets: int, plan: Plan, flush: Flush
    ) -> None:
        self.cuda, self.name, self.launch, self.flush = cuda, name, launch, flush
        self.buffers = Buffers(cuda, launch, sets, plan.seed, plan.tolerance)
        self.arguments: Arguments | None = None

    def bind(self, loaded: Loaded) -> Arguments:
        """The kernel's parameters; the same for all candidates."""
        if self.arguments is None:
            given = sum(not hasattr(a, "constant") for a in self.launch.args)
            extra = self.cuda.missing_parameters(loaded, given)
            self.arguments = Arguments.of(self.launch, self.buffers.pointers, extra)
        return self.arguments

    def run(self, which: Loaded, into: int, cold: bool = False) -> None:
        """One launch on the inputs of set ``into``; ``cold``: with nothing of them in the cache."""
        self.buffers.restore(into)
        if cold:
            self.flush()
        self.cuda.launch(which, self.launch, self.bind(which))

    def expect(self, original: Loaded, number: int, into: int) -> None:
        """Make sample ``number`` and what the original gives for it, which must be so twice."""
        self.buffers.set_number(number)
        self.buffers.make(into)
        self.run(original, into)
        self.buffers.expect(into)
        self.run(original, into)
        wrong = self.buffers.wrong(into)
        if wrong:
            raise BadInput(
                f"{self.name} is not deterministic: {wrong} {self._parts} of its outputs differ "
                "between two launches on the same inputs, so no candidate could be checked; tune "
                "a kernel whose outputs repeat (no floating-point atomics, no unwritten outputs), "
                "or say with --tolerance how far they may be apart"
            )

    def wrong(self, candidate: Loaded, into: int, cold: bool = False) -> int:
        """How much of the candidate's outputs differs on set ``into``."""
        self.run(candidate, into, cold)
        return self.buffers.wrong(into)

    def first_wrong(
        self, original: Loaded, candidate: Loaded, first: int, count: int
    ) -> tuple[int, int] | None:
        """(sample, how many parts of its outputs differ) of the first sample, of the ``count``
        from ``first`` on, in which the candidate is wrong; None when it never is."""
        singly = min(count, max(0, CAREFUL - first))
        for number in range(first, first + singly):
            wrong = self._carefully(original, candidate, number, cold=number == 0)
            if wrong:
                return number, wrong
        first, rest = first + singly, count - singly
        if rest == 0 or not self._many(original, candidate, first, rest):
            return None
        while rest > 1:
            half = rest // 2
            if self._many(original, candidate, first, half):
                rest = half
            else:
                first, rest = first + half, rest - half
        wrong = self._carefully(original, candidate, first)
        if wrong:
            return first, wrong
        raise BadInput(
            f"{self.name} is not deterministic: original and candidate differed on sample {first}, "
            "and not when it ran again; tune a kernel whose outputs repeat"
        )

    def said(self, found: tuple[int, int]) -> str:
        number, wrong = found
        return f"{wrong} {self._parts} of the outputs differ on sample {number}"

    def release(self) -> None:
        self.buffers.release()

    @property
    def _parts(self) -> str:
        return "words" if self.buffers.tolerance is None else "words or elements"

    def _carefully(
        self, original: Loaded, candidate: Loaded, number: int, cold: bool = False
    ) -> int:
        self.expect(original, CHECKS + number, 0)
        return self.wrong(candidate, 0, cold)

    def _many(self, original: Loaded, candidate: Loaded, first: int, count: int) -> int:
        """How much differs in ``count`` samples together."""

        def sample() -> None:
            self.buffers.make(0)
            self.run(original, 0)
            self.buffers.expect(0)
            self.run(candidate, 0)
            self.buffers.count_wrong(0)
            self.buffers.advance()

        def several() -> None:
            for _ in range(_PER_GRAPH):
                sample()

        self.buffers.set_number(CHECKS + first)
        self.buffers.clear_count()
        graph: Any = self.cuda.captured(several) if count >= _PER_GRAPH else None
        for _ in range(count // _PER_GRAPH):
            self.cuda.replay(graph)
        for _ in range(count % _PER_GRAPH):
            sample()
        wrong = self.buffers.counted()
        if graph is not None:
            self.cuda.drop(graph)
        return wrong
