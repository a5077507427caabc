"""Search spaces with illegal moves, and a device that keeps broken candidates out of a search.

The space proposes a few illegal moves, which run on the GPU without a check by the verifier. The
device records the outcome of each broken candidate and rejects those that the verifier finds
unsafe, so that a search never accepts them. Used by :mod:`benchmarks.sass.robustness.soak`.
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

ILLEGAL_SHARE = 0.003
"""Share of illegal moves among all draws. Most other draws turn out illegal and are not proposed,
so about three times this share of the proposals is illegal."""
KINDS = ("jump", "unwait", "hurry", "unannounce")


@dataclass(frozen=True, slots=True)
class UnverifiedMove:
    """A move of instruction ``index`` that ignores dependences.

    Kinds: ``jump`` moves it to position ``to`` of its block, ``unwait`` removes its scoreboard
    waits, ``hurry`` sets its stall to one cycle, ``unannounce`` removes its write scoreboard, so
    that its readers do not wait.
    """

    index: int
    kind: str
    to: int
    tags: Tags = frozenset({"unsafe"})
    error: ClassVar[type[IllegalMove]] = IllegalMove

    def __str__(self) -> str:
        return f"{self.kind} #{self.index}" + (f" to {self.to}" if self.kind == "jump" else "")


class SpaceWithIllegalMoves(ScheduleSpace):
    """A schedule space in which the share ``share`` of the draws is illegal.

    ``broken`` has the moves that led to each broken binary, by the binary's sha256.
    """

    def __init__(self, program: Program, function: Function, share: float = ILLEGAL_SHARE) -> None:
        super().__init__(program, function)
        self.share = share
        self.broken: dict[str, str] = {}
        self._causes: dict[bytes, str] = {}
        self._patcher = Patcher(program, function)

    def draw(
        self, state: Schedule, rng: np.random.Generator, required_tags: Tags = NO_TAGS
    ) -> ScheduleMove | UnverifiedMove | None:
        # With tags, the caller only checks whether such moves exist.
        if required_tags or rng.random() >= self.share:
            return super().draw(state, rng, required_tags)
        # Prefer memory accesses: wrong addresses are what causes faults.
        pool = (
            self._movable_memory if self._movable_memory and rng.random() < 0.7 else self._movable
        )
        if not pool:
            return None
        index = pool[int(rng.integers(len(pool)))]
        block = self.graph.blocks[self.graph.block_numbers[index]]
        to = int(rng.integers(block.start, block.end))
        kind = KINDS[int(rng.integers(len(KINDS)))]
        move = UnverifiedMove(index, kind, to)
        return None if self._break_schedule(state, move) == state else move

    def apply(self, state: Schedule, move: ScheduleMove | UnverifiedMove) -> Schedule:
        cause = self._causes.get(state.key())
        after = (
            self._break_schedule(state, move)
            if isinstance(move, UnverifiedMove)
            else super().apply(state, move)
        )
        if isinstance(move, UnverifiedMove) or cause is not None:
            cause = f"{cause}; {move}" if cause else str(move)
            self._causes[after.key()] = cause
            self.broken[_sha256(self._patcher.patch(after))] = cause
        return after

    def _break_schedule(self, state: Schedule, move: UnverifiedMove) -> Schedule:
        index = move.index
        if move.kind == "jump":
            block = self.graph.blocks[self.graph.block_numbers[index]]
            span = [i for i in state.order[block.start : block.end].tolist() if i != index]
            span.insert(move.to - block.start, index)
            order = state.order.copy()
            order[block.start : block.end] = span
            # Without cached operands (reuse), only the jump itself can break the kernel.
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
class BrokenCandidate:
    """Outcome of one broken binary on the GPU."""

    move: str
    fate: str
    """Status of the outcome, such as ``timed``, ``wrong`` or ``fault``."""
    detail: str
    safe: bool
    """Whether the verifier accepts the binary."""
    spoilt: bool
    """Whether the original failed afterwards in the same process, which was then replaced."""

    @property
    def is_wrongly_accepted(self) -> bool:
        """Whether the verifier accepts a binary that fails on the GPU; this must not happen."""
        return self.safe and self.fate != "timed"

    def as_row(self) -> Mapping[str, object]:
        return asdict(self)


class VerifyingDevice:
    """A device that runs broken binaries and rejects those that the verifier finds unsafe.

    Calls ``on_broken`` for each. If a broken binary passes the checks on the GPU but not the
    verifier, its outcome becomes ``rejected``, so that no search accepts it. ``lost`` lists the
    legal candidates that failed, because of an illegal candidate before them or because of a bug.
    """

    def __init__(
        self,
        device: Device,
        original: bytes,
        on_broken: Callable[[BrokenCandidate], None],
        share: float = ILLEGAL_SHARE,
    ) -> None:
        self.device, self.original, self.on_broken = device, original, on_broken
        self.share = share
        self.space: SpaceWithIllegalMoves | None = None
        self.legal = 0
        self.lost: list[str] = []
        self._known: dict[bytes, bool] = {}

    @property
    def info(self) -> Mapping[str, str]:
        return self.device.info

    def make_space(self, program: Program, function: Function) -> SpaceWithIllegalMoves:
        """Make the space whose broken binaries this device recognises."""
        self.space = SpaceWithIllegalMoves(program, function, self.share)
        return self.space

    def evaluate(self, cubin: bytes) -> Outcome:
        assert self.space is not None
        move = self.space.broken.get(_sha256(cubin))
        outcome = self.device.evaluate(cubin)
        if move is None:
            self.legal += 1
            if outcome.status != "timed":
                self.lost.append(f"{outcome.status}: {outcome.detail}")
            return outcome
        # Finalists are measured several times, and the verifier takes longer than the GPU.
        if cubin not in self._known:
            self._known[cubin] = _is_safe(self.original, cubin)
        safe = self._known[cubin]
        self.on_broken(
            BrokenCandidate(move, outcome.status, outcome.detail, safe, self._original_fails())
        )
        if outcome.status == "timed" and not safe:
            return Outcome("rejected", detail=f"refused by the verifier: {move}")
        return outcome

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        return self.device.compare(cubin, rounds, checks)

    def _original_fails(self) -> bool:
        """Whether the original fails now, because a broken kernel wrote to foreign memory."""
        if self.device.evaluate(self.original).status == "timed":
            return False
        self.device.compare(self.original, 2, 1)  # starts a new process
        return True


def _is_safe(original: bytes, cubin: bytes) -> bool:
    try:
        return verify(original, cubin).safe
    except NostallError:  # the binary cannot be parsed
        return False


def _sha256(cubin: bytes) -> str:
    return hashlib.sha256(cubin).hexdigest()
