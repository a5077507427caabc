"""Plans as a search space: small changes of cuts, mapping and order that keep a plan legal.

Plans with one stage a worker only; interleaved ones are compared as they come.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np

from nostall.core import IllegalMove, Space, Tags
from nostall.core.space import NO_TAGS
from nostall.parallel.plan import Plan, Policy, Stage, Workload
from nostall.parallel.planners.fitting import fitted
from nostall.parallel.simulate.orders import caps

ORDERS: tuple[Policy, ...] = ("pb", "list", "zero-bubble", "pa", "gpipe")
_UNUSED = -1
PARTS = 8
"""A stage is split at eighths of its layers and of its GPUs."""


@dataclass(frozen=True, slots=True)
class Move:
    """One change.  ``a`` and ``b`` are stages, -1 stands for the GPUs not in use.

    ``cut``: shift the end of stage a by x layers.  ``give``: GPU x goes from stage a to stage b.
    ``swap``: GPU x of stage a and GPU y of stage b change places.  Of GPUs that are alike only the
    first of each stage goes.  ``split``: stage a in two behind x eighths of its layers, the second
    with the last y eighths of its GPUs.  ``merge``: stage a with the next.  ``divide``: stage a and
    the next are merged and split anew in one step, because what lies between may be far worse;
    b = 1: the first gets the last GPUs.  ``order``: policy number a.  ``hold``: stage a may hold x
    micro-batches more.
    """

    kind: str
    a: int = 0
    b: int = 0
    x: int = 0
    y: int = 0

    @property
    def tags(self) -> Tags:
        """The kind alone."""
        return frozenset({self.kind})


class PlanSpace(Space[Plan, Move]):
    """All plans that fit into memory and can be reached from ``first``."""

    KINDS = ("cut", "give", "swap", "split", "merge", "divide", "order", "hold")

    def __init__(self, work: Workload, first: Plan) -> None:
        self.work = work
        self.first = first
        powers = range((len(work.profile) - 1).bit_length() + 1)
        self.steps = [sign << power for power in powers for sign in (1, -1)]
        self.pairs = list(itertools.combinations(range(len(work.cluster)), 2))

    def start(self) -> Plan:
        return self.first

    def draw(self, state: Plan, rng: np.random.Generator, wanted: Tags = NO_TAGS) -> Move | None:
        """One of all conceivable moves, each as likely; None when it is illegal."""
        sizes = {k: self._conceivable(state, k) for k in self.KINDS if wanted <= {k}}
        total = sum(sizes.values())
        if not total:
            return None
        at = int(rng.integers(total))
        for kind, size in sizes.items():
            if at < size:
                move = self._numbered(state, kind, at)
                return move if self._after(state, move) is not None else None
            at -= size
        return None

    def moves(self, state: Plan) -> Iterator[Move]:
        """Every legal move, by kind."""
        for kind in self.KINDS:
            for at in range(self._conceivable(state, kind)):
                move = self._numbered(state, kind, at)
                if self._after(state, move) is not None:
                    yield move

    def _conceivable(self, state: Plan, kind: str) -> int:
        """How many moves of a kind there are to draw from, legal or not."""
        stages, gpus = len(state.stages), len(self.work.cluster)
        return {
            "cut": (stages - 1) * len(self.steps),
            "give": gpus * (stages + 1),
            "swap": gpus * (gpus - 1) // 2,
            "split": stages * (PARTS - 1) ** 2,
            "merge": stages - 1,
            "divide": (stages - 1) * 2 * (PARTS - 1) ** 2,
            "order": len(ORDERS),
            "hold": 2 * stages,
        }[kind]

    def _numbered(self, state: Plan, kind: str, at: int) -> Move:
        """Move number ``at`` of a kind; distinct numbers are distinct moves."""
        if kind == "cut":
            return Move("cut", at // len(self.steps), x=self.steps[at % len(self.steps)])
        if kind == "give":
            stage, gpu = divmod(at, len(self.work.cluster))
            return Move("give", _holder(state, gpu), stage - 1, gpu)
        if kind == "swap":
            one, other = self.pairs[at]
            return Move("swap", _holder(state, one), _holder(state, other), one, other)
        if kind == "split":
            stage, part = at // (PARTS - 1) ** 2, at % (PARTS - 1) ** 2
            return Move("split", stage, x=part // (PARTS - 1) + 1, y=part % (PARTS - 1) + 1)
        if kind == "divide":
            stage, part = at // (2 * (PARTS - 1) ** 2), at % (2 * (PARTS - 1) ** 2)
            turned, part = part // (PARTS - 1) ** 2, part % (PARTS - 1) ** 2
            return Move("divide", stage, turned, part // (PARTS - 1) + 1, part % (PARTS - 1) + 1)
        if kind == "hold":
            return Move("hold", at // 2, x=1 if at % 2 else -1)
        return Move(kind, at)

    def apply(self, state: Plan, move: Move) -> Plan:
        after = self._after(state, move)
        if after is None:
            raise IllegalMove(
                f"{move} does not apply to a plan of {len(state.stages)} stages; allowed is what "
                "PlanSpace.moves offers"
            )
        return after

    def key(self, state: Plan) -> bytes:
        return repr(state).encode()

    def dump(self, state: Plan) -> str:
        return json.dumps(asdict(state))

    def load(self, text: str) -> Plan:
        record = json.loads(text)
        stages = tuple(Stage(s["first"], s["end"], tuple(s["gpus"])) for s in record["stages"])
        limits = record["in_flight"]
        return Plan(
            stages,
            record["policy"],
            None if limits is None else tuple(limits),
            record["recompute"],
        )

    def _gpus(self, state: Plan, stage: int) -> list[int]:
        if stage != _UNUSED:
            return list(state.stages[stage].gpus)
        used = {g for s in state.stages for g in s.gpus}
        return [g for g in range(len(self.work.cluster)) if g not in used]

    def _leaves(self, state: Plan, stage: int, gpu: int) -> bool:
        """Whether a stage has the GPU, and no earlier one that would leave the same plan."""
        held, twins = self._gpus(state, stage), self.work.cluster.twins
        return gpu in held and not any(g < gpu and twins[g] == twins[gpu] for g in held)

    def _trades(self, state: Plan, move: Move) -> bool:
        twins = self.work.cluster.twins
        return twins[move.x] != twins[move.y] and self._leaves(state, move.b, move.y)

    def _after(self, state: Plan, move: Move) -> Plan | None:
        """The plan after the move, or None where it is illegal or does not fit into memory."""
        if move.kind == "order":
            policy = ORDERS[move.a]
            after = replace(state, policy=policy, in_flight=None)
            return fitted(self.work, after) if policy != state.policy else None
        if move.kind == "hold":
            return self._hold(state, move)
        if not -1 <= min(move.a, move.b) <= max(move.a, move.b) < len(state.stages):
            return None
        if move.kind in ("give", "swap") and not self._leaves(state, move.a, move.x):
            return None
        if move.kind == "swap" and not self._trades(state, move):
            return None
        stages = list(state.stages)
        changed = _CHANGES[move.kind](stages, move)
        if not changed:
            return None
        return fitted(self.work, replace(state, stages=tuple(stages), in_flight=None))

    def _hold(self, state: Plan, move: Move) -> Plan | None:
        if state.policy not in ("list", "zero-bubble") or len(state.stages) == 1:
            return None
        if move.a >= len(state.stages):
            return None
        limits = caps(state, self.work.micro_batches)
        limits[move.a] += move.x
        if not 1 <= limits[move.a] <= self.work.micro_batches:
            return None
        after = replace(state, in_flight=tuple(limits))
        return after if fitted(self.work, after) == after else None


def _holder(state: Plan, gpu: int) -> int:
    """The stage that uses a GPU."""
    return next((s for s, stage in enumerate(state.stages) if gpu in stage.gpus), _UNUSED)


def _cut(stages: list[Stage], move: Move) -> bool:
    if move.a + 1 >= len(stages):
        return False
    one, two = stages[move.a : move.a + 2]
    at = one.end + move.x
    if not one.first < at < two.end:
        return False
    stages[move.a], stages[move.a + 1] = replace(one, end=at), replace(two, first=at)
    return True


def _give(stages: list[Stage], move: Move) -> bool:
    if move.a == move.b:
        return False
    if move.a != _UNUSED:
        left = tuple(g for g in stages[move.a].gpus if g != move.x)
        if not left:
            return False
        stages[move.a] = replace(stages[move.a], gpus=left)
    if move.b != _UNUSED:
        gpus = tuple(sorted((*stages[move.b].gpus, move.x)))
        stages[move.b] = replace(stages[move.b], gpus=gpus)
    return True


def _swap(stages: list[Stage], move: Move) -> bool:
    if move.a == move.b:
        return False
    for stage, old, new in ((move.a, move.x, move.y), (move.b, move.y, move.x)):
        if stage != _UNUSED:
            gpus = tuple(sorted(new if g == old else g for g in stages[stage].gpus))
            stages[stage] = replace(stages[stage], gpus=gpus)
    return True


def _split(stages: list[Stage], move: Move) -> bool:
    stage = stages[move.a]
    layers, gpus = _part(stage.end - stage.first, move.x), _part(len(stage.gpus), move.y)
    if not layers or not gpus:
        return False
    middle, at = stage.first + layers, len(stage.gpus) - gpus
    stages[move.a : move.a + 1] = [
        Stage(stage.first, middle, stage.gpus[:at]),
        Stage(middle, stage.end, stage.gpus[at:]),
    ]
    return True


def _part(whole: int, eighths: int) -> int:
    """That part of a number; 0 where one eighth less is as much, so that none counts twice."""
    part = whole * eighths // PARTS
    return part if part > whole * (eighths - 1) // PARTS and part < whole else 0


def _merge(stages: list[Stage], move: Move) -> bool:
    if move.a + 1 >= len(stages):
        return False
    one, two = stages[move.a : move.a + 2]
    stages[move.a : move.a + 2] = [Stage(one.first, two.end, tuple(sorted((*one.gpus, *two.gpus))))]
    return True


def _divide(stages: list[Stage], move: Move) -> bool:
    before = stages[move.a : move.a + 2]
    if not _merge(stages, move):
        return False
    if move.b:
        stages[move.a] = replace(stages[move.a], gpus=stages[move.a].gpus[::-1])
    if not _split(stages, move):
        return False
    after = [replace(stage, gpus=tuple(sorted(stage.gpus))) for stage in stages[move.a :][:2]]
    stages[move.a : move.a + 2] = after
    return after != before


_CHANGES = {
    "cut": _cut,
    "give": _give,
    "swap": _swap,
    "split": _split,
    "merge": _merge,
    "divide": _divide,
}
