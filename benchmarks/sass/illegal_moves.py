"""Moves that break a schedule on purpose, and the gate that no broken one may pass.

A space that now and then offers an illegal move, run on the GPU without asking the verifier first;
and a device that keeps book of what became of each, and asks the verifier before the search may
take one for good.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

import numpy as np

from nostall.core.errors import IllegalMove, NostallError
from nostall.core.space import NO_TAGS, Tags
from nostall.gpu import Device, Outcome
from nostall.sass.program import Function, Program
from nostall.sass.safety import verify
from nostall.sass.schedule import Patcher, Schedule, ScheduleSpace
from nostall.sass.schedule.moves import ScheduleMove

SHARE = 0.003
"""Illegal draws among all; most legal-looking draws turn out illegal and are not offered, so among
what is proposed it is some three times as many."""
KINDS = ("jump", "unwait", "hurry", "unannounce")


@dataclass(frozen=True, slots=True)
class Unsafe:
    """Break the schedule around instruction ``index``.

    ``jump``: to position ``to`` of its block, past what it depends on; ``unwait``: it waits for no
    scoreboard; ``hurry``: it stalls one cycle; ``unannounce``: nobody hears of its result.
    """

    index: int
    kind: str
    to: int
    tags: Tags = frozenset({"unsafe"})
    error: ClassVar[type[IllegalMove]] = IllegalMove

    def __str__(self) -> str:
        return f"{self.kind} #{self.index}" + (f" to {self.to}" if self.kind == "jump" else "")


class UnsafeSpace(ScheduleSpace):
    """The usual space, in which ``share`` of the draws are illegal and offered all the same.

    ``broken`` names the moves behind each binary that an illegal one led to, by sha256.
    """

    def __init__(self, program: Program, function: Function, share: float = SHARE) -> None:
        super().__init__(program, function)
        self.share = share
        self.broken: dict[str, str] = {}
        self._tainted: dict[bytes, str] = {}
        self._patcher = Patcher(program, function)

    def draw(
        self, state: Schedule, rng: np.random.Generator, wanted: Tags = NO_TAGS
    ) -> ScheduleMove | Unsafe | None:
        # Who asks for certain moves only wants to know whether there are any.
        if wanted or rng.random() >= self.share:
            return super().draw(state, rng, wanted)
        # Memory accesses more often than others: their addresses are what faults come from.
        pool = (
            self._movable_memory if self._movable_memory and rng.random() < 0.7 else self._movable
        )
        if not pool:
            return None
        index = pool[int(rng.integers(len(pool)))]
        block = self.graph.blocks[self.graph.block_numbers[index]]
        to = int(rng.integers(block.start, block.end))
        kind = KINDS[int(rng.integers(len(KINDS)))]
        move = Unsafe(index, kind, to)
        return None if self._broken(state, move) == state else move

    def apply(self, state: Schedule, move: ScheduleMove | Unsafe) -> Schedule:
        cause = self._tainted.get(state.key())
        after = (
            self._broken(state, move) if isinstance(move, Unsafe) else super().apply(state, move)
        )
        if isinstance(move, Unsafe) or cause is not None:
            cause = f"{cause}; {move}" if cause else str(move)
            self._tainted[after.key()] = cause
            self.broken[_name(self._patcher.patch(after))] = cause
        return after

    def _broken(self, state: Schedule, move: Unsafe) -> Schedule:
        index = move.index
        if move.kind == "jump":
            block = self.graph.blocks[self.graph.block_numbers[index]]
            span = [i for i in state.order[block.start : block.end].tolist() if i != index]
            span.insert(move.to - block.start, index)
            order = state.order.copy()
            order[block.start : block.end] = span
            # Cached operands would be stale in ways that depend on the next word; without them what
            # breaks is the jump itself.
            return replace(state, order=order, reuse=np.zeros_like(state.reuse))
        field, value = {
            "unwait": ("wait", 0),
            "hurry": ("stall", 1),
            "unannounce": ("write_sb", 7),
        }[move.kind]
        values = getattr(state, field).copy()
        values[index] = value
        return replace(state, **{field: values})


@dataclass(frozen=True)
class Broken:
    """What became of one broken binary.

    ``safe``: the verifier's word on it; ``spoilt``: afterwards the original itself no longer gave
    its own results in that process, which was then replaced.
    """

    move: str
    fate: str
    detail: str
    safe: bool
    spoilt: bool

    @property
    def accepted_though_wrong(self) -> bool:
        """The one thing that must not happen."""
        return self.safe and self.fate != "timed"

    def as_row(self) -> Mapping[str, object]:
        return asdict(self)


class Gate:
    """A device that lets broken binaries run, and keeps them from being taken.

    Each is told to ``on_broken``.  One that the checks on the GPU pass goes to the verifier: what
    it refuses comes back as rejected, so that no search accepts it.  ``lost`` lists legal
    candidates that failed: a result that was lost to an illegal one before it, or a bug.
    """

    def __init__(
        self,
        device: Device,
        original: bytes,
        on_broken: Callable[[Broken], None],
        share: float = SHARE,
    ) -> None:
        self.device, self.original, self.on_broken = device, original, on_broken
        self.share = share
        self.space: UnsafeSpace | None = None
        self.legal = 0
        self.lost: list[str] = []
        self._known: dict[bytes, bool] = {}

    @property
    def info(self) -> Mapping[str, str]:
        return self.device.info

    def make_space(self, program: Program, function: Function) -> UnsafeSpace:
        """The space that this gate knows the broken binaries of."""
        self.space = UnsafeSpace(program, function, self.share)
        return self.space

    def evaluate(self, cubin: bytes) -> Outcome:
        assert self.space is not None
        move = self.space.broken.get(_name(cubin))
        outcome = self.device.evaluate(cubin)
        if move is None:
            self.legal += 1
            if outcome.status != "timed":
                self.lost.append(f"{outcome.status}: {outcome.detail}")
            return outcome
        # Finalists come again and again, and the verifier takes longer than the GPU.
        if cubin not in self._known:
            self._known[cubin] = _safe(self.original, cubin)
        safe = self._known[cubin]
        self.on_broken(Broken(move, outcome.status, outcome.detail, safe, self._spoilt()))
        if outcome.status == "timed" and not safe:
            return Outcome("rejected", detail=f"refused by the verifier: {move}")
        return outcome

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        return self.device.compare(cubin, rounds, checks)

    def _spoilt(self) -> bool:
        """Whether the original fails by now: a broken kernel may have written anywhere."""
        if self.device.evaluate(self.original).status == "timed":
            return False
        self.device.compare(self.original, 2, 1)  # begins in a fresh process, which then stays
        return True


def _safe(original: bytes, cubin: bytes) -> bool:
    try:
        return verify(original, cubin).safe
    except NostallError:  # no longer a program that can be read
        return False


def _name(cubin: bytes) -> str:
    return hashlib.sha256(cubin).hexdigest()
