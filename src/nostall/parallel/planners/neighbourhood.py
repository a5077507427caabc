"""Plans as a search space: small changes of cuts, mapping and order that keep a plan legal.

Plans with one stage a worker only; interleaved ones are compared as they come.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from nostall.core import IllegalMove, Space, Tags
from nostall.core.space import NO_TAGS
from nostall.parallel.plan import Plan, Policy, Stage, Workload
from nostall.parallel.planners.fitting import fitted
from nostall.parallel.simulate.orders import caps

ORDERS: tuple[Policy, ...] = ("pb", "list", "zero-bubble", "pa", "gpipe")
_UNUSED = -1


@dataclass(frozen=True, slots=True)
class Move:
    """One change.  ``a`` and ``b`` are stages (or an order's number), ``x`` and ``y`` details.

    ``cut``: shift the end of stage a by x layers.  ``give``: GPU x goes from stage a to stage b;
    -1 stands for the GPUs not in use.  ``swap``: GPUs x and y of stages a and b change places.
    ``split``: stage a in two at layer x, the second with its last y GPUs.  ``merge``: stage a with
    the next.  ``order``: another policy.  ``hold``: stage a may hold x micro-batches more.
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

    KINDS = ("cut", "give", "swap", "split", "merge", "order", "hold")

    def __init__(self, work: Workload, first: Plan) -> None:
        self.work = work
        self.first = first
        self.layers = len(work.profile)

    def start(self) -> Plan:
        return self.first

    def draw(self, state: Plan, rng: np.random.Generator, wanted: Tags = NO_TAGS) -> Move | None:
        """A kind, cuts more often than others, then details uniformly; None when illegal."""
        kinds = [kind for kind in self.KINDS if wanted <= {kind}]
        if not kinds:
            return None
        if "cut" in kinds:  # the longest way to go is in cuts
            kinds += ["cut"] * 3
        move = self._draw(state, kinds[int(rng.integers(len(kinds)))], rng)
        return move if move is not None and self._after(state, move) is not None else None

    def _draw(self, state: Plan, kind: str, rng: np.random.Generator) -> Move | None:
        stages = len(state.stages)
        a, b = int(rng.integers(stages)), int(rng.integers(-1, stages))
        if kind == "cut":
            reach = max(1, self.layers // (4 * stages))
            size = int(np.ceil(reach ** float(rng.random())))
            return Move("cut", a, x=size if rng.random() < 0.5 else -size)
        if kind == "give":
            a = int(rng.integers(-1, stages))
            pool = self._gpus(state, a)
            return Move("give", a, b, _any(pool, rng)) if pool else None
        if kind == "swap":
            pool = self._gpus(state, b)
            if not pool:
                return None
            return Move("swap", a, b, _any(state.stages[a].gpus, rng), _any(pool, rng))
        if kind == "split":
            stage = state.stages[a]
            if stage.end - stage.first < 2 or len(stage.gpus) < 2:
                return None
            at = int(rng.integers(stage.first + 1, stage.end))
            return Move("split", a, x=at, y=int(rng.integers(1, len(stage.gpus))))
        if kind == "order":
            return Move("order", int(rng.integers(len(ORDERS))))
        return Move(kind, a, x=1 if rng.random() < 0.5 else -1)

    def moves(self, state: Plan) -> Iterator[Move]:
        """Every legal move; shifts of cuts by one layer and by powers of two."""
        stages = range(len(state.stages))
        pools = [_UNUSED, *stages]
        steps = [s << k for k in range(max(1, self.layers.bit_length())) for s in (1, -1)]
        every: list[Move] = [Move("cut", a, x=x) for a in stages for x in steps]
        every += [Move("give", a, b, x) for a in pools for b in pools for x in self._gpus(state, a)]
        every += [
            Move("swap", a, b, x, y)
            for a in stages
            for b in pools
            if b < a
            for x in state.stages[a].gpus
            for y in self._gpus(state, b)
        ]
        every += [
            Move("split", a, x=x, y=y)
            for a in stages
            for x in range(state.stages[a].first + 1, state.stages[a].end)
            for y in range(1, len(state.stages[a].gpus))
        ]
        every += [Move("merge", a) for a in stages]
        every += [Move("order", o) for o in range(len(ORDERS))]
        every += [Move("hold", a, x=x) for a in stages for x in (1, -1)]
        return (move for move in every if self._after(state, move) is not None)

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

    def _after(self, state: Plan, move: Move) -> Plan | None:
        """The plan after the move, or None where it is illegal or does not fit into memory."""
        if move.kind == "order":
            policy = ORDERS[move.a]
            after = replace(state, policy=policy, in_flight=None)
            return fitted(self.work, after) if policy != state.policy else None
        if move.kind == "hold":
            return self._hold(state, move)
        stages = list(state.stages)
        changed = _CHANGES[move.kind](stages, move)
        if not changed:
            return None
        return fitted(self.work, replace(state, stages=tuple(stages), in_flight=None))

    def _hold(self, state: Plan, move: Move) -> Plan | None:
        if state.policy not in ("list", "zero-bubble") or len(state.stages) == 1:
            return None
        limits = caps(state, self.work.micro_batches)
        limits[move.a] += move.x
        if not 1 <= limits[move.a] <= self.work.micro_batches:
            return None
        after = replace(state, in_flight=tuple(limits))
        return after if fitted(self.work, after) == after else None


def _any(gpus: Sequence[int], rng: np.random.Generator) -> int:
    return gpus[int(rng.integers(len(gpus)))]


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
    if not stage.first < move.x < stage.end or not 0 < move.y < len(stage.gpus):
        return False
    at = len(stage.gpus) - move.y
    stages[move.a : move.a + 1] = [
        Stage(stage.first, move.x, stage.gpus[:at]),
        Stage(move.x, stage.end, stage.gpus[at:]),
    ]
    return True


def _merge(stages: list[Stage], move: Move) -> bool:
    if move.a + 1 >= len(stages):
        return False
    one, two = stages[move.a : move.a + 2]
    stages[move.a : move.a + 2] = [Stage(one.first, two.end, tuple(sorted((*one.gpus, *two.gpus))))]
    return True


_CHANGES = {"cut": _cut, "give": _give, "swap": _swap, "split": _split, "merge": _merge}
