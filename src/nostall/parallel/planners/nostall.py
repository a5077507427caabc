"""nostall's own planner: the best published plan, then a search over cuts, mapping and order.

The cheap plans (:mod:`.fastest`) are candidates, and every other planner's plan: as it is, in every
order, and with a split backward pass.  The result is therefore never worse, in modelled time, than
any of these plans.

Search space of plans: small legal changes (moves) of cuts, mapping and order.

Covers plans with one stage per worker.  Interleaved plans are candidates of the planner but are not
changed by moves.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

import numpy as np

from nostall.core import Budget, IllegalMove, Measurement, Objective, Space, Tags
from nostall.core.measurement import Kind
from nostall.core.space import NO_TAGS
from nostall.parallel.errors import BadPlan, Infeasible
from nostall.parallel.plan import Plan, Policy, Stage, Workload
from nostall.parallel.planners.baselines import data_parallel, even, gpipe, pipedream
from nostall.parallel.planners.cut_positions import balanced_cuts, straight_stages
from nostall.parallel.planners.dapple import dapple
from nostall.parallel.planners.effort import Effort
from nostall.parallel.planners.fastest import simulated_cheap_plans
from nostall.parallel.planners.memory_fit import fit_to_memory
from nostall.parallel.planners.spp import partitions, spp
from nostall.parallel.simulate import simulated_s
from nostall.parallel.simulate.orders import in_flight_limits
from nostall.search import Anneal

ORDERS: tuple[Policy, ...] = ("pb", "list", "zero-bubble", "pa", "gpipe")
UNUSED = -1
"""Stage number that stands for the GPUs without a stage."""
EIGHTHS = 8
"""A stage is split at eighths of its layers and of its GPUs."""
_SPLITS = (EIGHTHS - 1) ** 2
"""Ways to split a stage."""


@dataclass(frozen=True, slots=True)
class Move:
    """One change of a plan; a stage number of -1 stands for the GPUs without a stage.

    Kinds and their fields:

    - ``cut``: shift the end of stage ``a`` by ``x`` layers.
    - ``give``: move GPU ``x`` from stage ``a`` to stage ``b``.
    - ``swap``: exchange GPU ``x`` of stage ``a`` and GPU ``y`` of stage ``b``.
    - ``split``: split stage ``a`` after ``x`` eighths of its layers; the second part gets the last
      ``y`` eighths of its GPUs.
    - ``merge``: merge stage ``a`` with the next one.
    - ``divide``: merge stage ``a`` with the next one and split the result as ``split`` does, in one
      move, because the merged plan may be far worse than both; ``b = 1`` gives the last GPUs to the
      first part.
    - ``order``: take policy number ``a`` of ``ORDERS``.
    - ``hold``: allow stage ``a`` to hold ``x`` more micro-batches.

    Of interchangeable GPUs of a stage, only the first is given or swapped.
    """

    kind: str
    a: int = 0
    b: int = 0
    x: int = 0
    y: int = 0

    @property
    def tags(self) -> Tags:
        """The kind of the move."""
        return frozenset({self.kind})


class PlanSpace(Space[Plan, Move]):
    """All plans that fit into memory and can be reached by moves from ``first``."""

    KINDS = ("cut", "give", "swap", "split", "merge", "divide", "order", "hold")

    def __init__(self, workload: Workload, first: Plan) -> None:
        self.workload = workload
        self.first = first
        powers = range((len(workload.profile) - 1).bit_length() + 1)
        self.shifts = [sign << power for power in powers for sign in (1, -1)]
        self.gpu_pairs = list(itertools.combinations(range(len(workload.cluster)), 2))

    def start(self) -> Plan:
        return self.first

    def draw(
        self, state: Plan, rng: np.random.Generator, required_tags: Tags = NO_TAGS
    ) -> Move | None:
        """A move drawn uniformly from all candidates, legal or not; None if it is illegal."""
        counts = {k: self._candidate_count(state, k) for k in self.KINDS if required_tags <= {k}}
        total = sum(counts.values())
        if not total:
            return None
        number = int(rng.integers(total))
        for kind, count in counts.items():
            if number < count:
                move = self._candidate(state, kind, number)
                return move if self._after(state, move) is not None else None
            number -= count
        return None

    def moves(self, state: Plan) -> Iterator[Move]:
        """All legal moves, by kind."""
        for kind in self.KINDS:
            for number in range(self._candidate_count(state, kind)):
                move = self._candidate(state, kind, number)
                if self._after(state, move) is not None:
                    yield move

    def _candidate_count(self, state: Plan, kind: str) -> int:
        """Number of candidate moves of a kind, legal or not."""
        stages, gpus = len(state.stages), len(self.workload.cluster)
        return {
            "cut": (stages - 1) * len(self.shifts),
            "give": gpus * (stages + 1),
            "swap": len(self.gpu_pairs),
            "split": stages * _SPLITS,
            "merge": stages - 1,
            "divide": (stages - 1) * 2 * _SPLITS,
            "order": len(ORDERS),
            "hold": 2 * stages,
        }[kind]

    def _candidate(self, state: Plan, kind: str, number: int) -> Move:
        """Candidate move ``number`` of a kind; different numbers are different moves."""
        if kind == "cut":
            stage, shift = divmod(number, len(self.shifts))
            return Move("cut", stage, x=self.shifts[shift])
        if kind == "give":
            stage, gpu = divmod(number, len(self.workload.cluster))
            return Move("give", _stage_of_gpu(state, gpu), stage - 1, gpu)
        if kind == "swap":
            first, second = self.gpu_pairs[number]
            stages = _stage_of_gpu(state, first), _stage_of_gpu(state, second)
            return Move("swap", *stages, first, second)
        if kind == "split":
            stage, split = divmod(number, _SPLITS)
            return Move("split", stage, x=split // (EIGHTHS - 1) + 1, y=split % (EIGHTHS - 1) + 1)
        if kind == "divide":
            stage, rest = divmod(number, 2 * _SPLITS)
            reverse, split = divmod(rest, _SPLITS)
            layers, gpus = split // (EIGHTHS - 1) + 1, split % (EIGHTHS - 1) + 1
            return Move("divide", stage, reverse, layers, gpus)
        if kind == "hold":
            return Move("hold", number // 2, x=1 if number % 2 else -1)
        return Move(kind, number)

    def apply(self, state: Plan, move: Move) -> Plan:
        after = self._after(state, move)
        if after is None:
            raise IllegalMove(
                f"{move} does not apply to a plan of {len(state.stages)} stages; allowed are the "
                "moves that PlanSpace.moves returns"
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
        if stage != UNUSED:
            return list(state.stages[stage].gpus)
        used = {g for s in state.stages for g in s.gpus}
        return [g for g in range(len(self.workload.cluster)) if g not in used]

    def _may_leave(self, state: Plan, stage: int, gpu: int) -> bool:
        """Whether ``gpu`` is the first of the stage's GPUs that are interchangeable with it."""
        gpus, representatives = self._gpus(state, stage), self.workload.cluster.representatives
        return gpu in gpus and not any(
            g < gpu and representatives[g] == representatives[gpu] for g in gpus
        )

    def _is_legal_swap(self, state: Plan, move: Move) -> bool:
        representatives = self.workload.cluster.representatives
        are_different = representatives[move.x] != representatives[move.y]
        return are_different and self._may_leave(state, move.b, move.y)

    def _after(self, state: Plan, move: Move) -> Plan | None:
        """The plan after the move; None if the move is illegal or the plan exceeds the memory."""
        if move.kind == "order":
            policy = ORDERS[move.a]
            after = replace(state, policy=policy, in_flight=None)
            return fit_to_memory(self.workload, after) if policy != state.policy else None
        if move.kind == "hold":
            return self._hold(state, move)
        if not -1 <= min(move.a, move.b) <= max(move.a, move.b) < len(state.stages):
            return None
        if move.kind in ("give", "swap") and not self._may_leave(state, move.a, move.x):
            return None
        if move.kind == "swap" and not self._is_legal_swap(state, move):
            return None
        stages = list(state.stages)
        changed = _CHANGES[move.kind](stages, move)
        if not changed:
            return None
        return fit_to_memory(self.workload, replace(state, stages=tuple(stages), in_flight=None))

    def _hold(self, state: Plan, move: Move) -> Plan | None:
        if state.policy not in ("list", "zero-bubble") or len(state.stages) == 1:
            return None
        if move.a >= len(state.stages):
            return None
        limits = in_flight_limits(state, self.workload.micro_batches)
        limits[move.a] += move.x
        if not 1 <= limits[move.a] <= self.workload.micro_batches:
            return None
        after = replace(state, in_flight=tuple(limits))
        return after if fit_to_memory(self.workload, after) == after else None


def _stage_of_gpu(state: Plan, gpu: int) -> int:
    """Number of the stage that uses a GPU; ``UNUSED`` if none does."""
    return next((s for s, stage in enumerate(state.stages) if gpu in stage.gpus), UNUSED)


# Each function below changes ``stages`` in place and returns whether the move is possible.


def _cut(stages: list[Stage], move: Move) -> bool:
    if move.a + 1 >= len(stages):
        return False
    first, second = stages[move.a : move.a + 2]
    cut = first.end + move.x
    if not first.first < cut < second.end:
        return False
    stages[move.a], stages[move.a + 1] = replace(first, end=cut), replace(second, first=cut)
    return True


def _give(stages: list[Stage], move: Move) -> bool:
    if move.a == move.b:
        return False
    if move.a != UNUSED:
        remaining = tuple(g for g in stages[move.a].gpus if g != move.x)
        if not remaining:
            return False
        stages[move.a] = replace(stages[move.a], gpus=remaining)
    if move.b != UNUSED:
        gpus = tuple(sorted((*stages[move.b].gpus, move.x)))
        stages[move.b] = replace(stages[move.b], gpus=gpus)
    return True


def _swap(stages: list[Stage], move: Move) -> bool:
    if move.a == move.b:
        return False
    for stage, old, new in ((move.a, move.x, move.y), (move.b, move.y, move.x)):
        if stage != UNUSED:
            gpus = tuple(sorted(new if g == old else g for g in stages[stage].gpus))
            stages[stage] = replace(stages[stage], gpus=gpus)
    return True


def _split(stages: list[Stage], move: Move) -> bool:
    stage = stages[move.a]
    layers = _eighths(stage.end - stage.first, move.x)
    gpus = _eighths(len(stage.gpus), move.y)
    if not layers or not gpus:
        return False
    cut, kept_gpus = stage.first + layers, len(stage.gpus) - gpus
    stages[move.a : move.a + 1] = [
        Stage(stage.first, cut, stage.gpus[:kept_gpus]),
        Stage(cut, stage.end, stage.gpus[kept_gpus:]),
    ]
    return True


def _eighths(total: int, eighths: int) -> int:
    """``eighths`` eighths of ``total``, rounded down; 0 if one eighth less gives the same number.

    The 0 makes the move illegal, so the same split is not offered twice.
    """
    part = total * eighths // EIGHTHS
    return part if part > total * (eighths - 1) // EIGHTHS and part < total else 0


def _merge(stages: list[Stage], move: Move) -> bool:
    if move.a + 1 >= len(stages):
        return False
    first, second = stages[move.a : move.a + 2]
    gpus = tuple(sorted((*first.gpus, *second.gpus)))
    stages[move.a : move.a + 2] = [Stage(first.first, second.end, gpus)]
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


EVALUATIONS = 4800
"""Simulated plans of the search if the time limit allows: half for simulated annealing, half for
the best-first search after it."""
MAX_EXPANDED = 60
"""Plans that the best-first search expands."""
ANNEALING_STARTS = 3
"""Best candidates with different stages from which simulated annealing starts."""


class SimulatedTime(Objective[Plan]):
    """Modelled iteration time of the event simulator, in seconds."""

    kind: ClassVar[Kind] = "modelled"
    unit: ClassVar[str] = "s"

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def evaluate(self, states: Sequence[Plan]) -> list[Measurement]:
        return [
            Measurement(self.unit, (simulated_s(self.workload, plan),), self.kind)
            for plan in states
        ]


def nostall(workload: Workload, effort: Effort) -> Plan:
    """The plan with the least modelled time of all candidates and of two searches from the best.

    Raises :class:`Infeasible` if no planner has a plan that fits into memory.
    """
    cheap = dict(simulated_cheap_plans(workload, effort.recompute).values())
    plans = list(candidates(workload, effort))
    if not plans and not cheap:
        raise effort.no_plan(
            "no plan fits into memory; use more GPUs, a smaller micro-batch or a smaller "
            "--state-factor"
        )
    times = _simulate_all(workload, plans, effort, cheap)
    ranked = sorted(times.items(), key=lambda pair: pair[1])
    best, seconds = ranked[0]
    starts = [plan for plan, _ in ranked if not plan.interleaved]
    evaluations = (effort.evaluations or EVALUATIONS) // 2
    for i, start in enumerate(_with_different_stages(starts)):
        if effort.is_over:
            break
        effort.report_progress(0.6 + 0.4 * i / ANNEALING_STARTS, "nostall: searching")
        budget = Budget(
            seconds=effort.remaining_s / (ANNEALING_STARTS - i + 1),
            evaluations=max(1, evaluations // ANNEALING_STARTS),
        )
        # With a memo_size, plans that were simulated before would not count against the budget, and
        # a small space has few others.
        result = Anneal(memo_size=0).run(
            PlanSpace(workload, start), SimulatedTime(workload), budget, seed=effort.seed + i
        )
        if result.best_measurement.value < seconds:
            best, seconds = result.best, result.best_measurement.value
    return best if best.interleaved else _best_first(workload, best, seconds, evaluations, effort)


def _simulate_all(
    workload: Workload, plans: Sequence[Plan], effort: Effort, known: Mapping[Plan, float]
) -> dict[Plan, float]:
    """Modelled seconds of the plans, at the limit of those simulated so far, and ``known`` ones."""
    times: dict[Plan, float] = {}
    for plan in plans:
        if (times or known) and effort.is_over:
            break
        times[plan] = simulated_s(workload, plan)
    return times | {plan: seconds for plan, seconds in known.items() if plan not in times}


def _best_first(
    workload: Workload, start: Plan, start_s: float, evaluations: int, effort: Effort
) -> Plan:
    """The best plan of a best-first search that tries each move of a plan in every order.

    Annealing can miss improvements that need two moves and another order at once.
    """
    space = PlanSpace(workload, start)
    queue = [(start_s, 0, start)]
    seen = {start}
    best, best_s = start, start_s
    for _ in range(MAX_EXPANDED):
        if not queue or len(seen) > evaluations or effort.is_over:
            break
        _, _, plan = heapq.heappop(queue)
        for move in space.moves(plan):
            moved = space.apply(plan, move)
            neighbours = (
                [moved] if move.kind in ("order", "hold") else _in_all_orders(workload, moved)
            )
            for neighbour in neighbours:
                if neighbour in seen or len(seen) > evaluations or effort.is_over:
                    continue
                seen.add(neighbour)
                seconds = simulated_s(workload, neighbour)
                heapq.heappush(queue, (seconds, len(seen), neighbour))
                if seconds < best_s:
                    best, best_s = neighbour, seconds
    return best


def _in_all_orders(workload: Workload, plan: Plan) -> list[Plan]:
    """The plan in each order in which it fits into memory."""
    plans = (
        fit_to_memory(workload, replace(plan, policy=policy, in_flight=None)) for policy in ORDERS
    )
    return [plan for plan in plans if plan is not None]


def candidates(workload: Workload, effort: Effort) -> Iterator[Plan]:
    """Every other planner's plan and all SPP partitions, in every order that fits into memory."""
    plans: list[Plan] = []
    for planner in (spp, pipedream, even, gpipe, data_parallel, dapple):
        if plans and effort.is_over:
            break
        effort.report_progress(0.1 * len(plans), planner.__name__)
        try:
            plans.append(planner(workload, effort))
        except (BadPlan, Infeasible):
            continue  # this planner has no plan to add
    yield from plans
    for stages in () if effort.is_over else partitions(workload, effort):
        plan = fit_to_memory(workload, Plan(stages))
        if plan is None and effort.recompute:
            plan = fit_to_memory(workload, Plan(stages, recompute=True))
        plans += [plan] if plan is not None else []
    for plan in plans:
        if effort.is_over:
            return
        yield from _in_all_orders(workload, plan)
    if not effort.is_over:
        yield from _interleaved(workload)


def _interleaved(workload: Workload) -> Iterator[Plan]:
    """A plan with two stages per GPU, assigned in rotation, if the interleaved order allows it."""
    n, layers = len(workload.cluster), len(workload.profile)
    if n < 2 or layers < 2 * n or workload.micro_batches % n:
        return
    stages = straight_stages(balanced_cuts(workload, 2 * n))
    rotated = tuple(replace(stage, gpus=(i % n,)) for i, stage in enumerate(stages))
    if (plan := fit_to_memory(workload, Plan(rotated, "interleaved"))) is not None:
        yield plan


def _with_different_stages(plans: Sequence[Plan]) -> Iterator[Plan]:
    """The first ``ANNEALING_STARTS`` plans that differ in their stages."""
    seen: set[tuple[Stage, ...]] = set()
    for plan in plans:
        if plan.stages not in seen and len(seen) < ANNEALING_STARTS:
            seen.add(plan.stages)
            yield plan
