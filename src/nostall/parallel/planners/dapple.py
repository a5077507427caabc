"""DAPPLE's planner (arXiv:2007.01045, section 4): dynamic programming over (layers, GPUs).

T(j, m, g) is the latency of a plan whose first j layers lie on the m GPUs g and whose other layers
are one stage on all other GPUs (equations 4, 5).  A step splits that last stage at j' and gives
the new front part m' GPUs, placed in each of three ways; the best plan of a state is kept.  Pure
data parallelism with overlapped all-reduce is the plan without steps.

Our reading where the text is open: memory limits D to what fits (a stage that cannot hold one
micro-batch is refused); the plan runs with PB warm-up, for which the closed form holds; and since
the closed form knows nothing of boundaries that share a network port, there are four searches, of
what each ranks first the simulator chooses: at most two stages ("as few stages as possible"), free,
one server a stage (whose front parts T underrates, because it counts the other GPUs as one stage
that reduces over the network), and one GPU a stage ("straight").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.parallel.errors import Infeasible
from nostall.parallel.plan import Plan, Stage, Workload
from nostall.parallel.planners.closed_form import closed_form, latency
from nostall.parallel.planners.effort import Effort
from nostall.parallel.planners.fitting import fitted
from nostall.parallel.planners.merging import candidate_cuts
from nostall.parallel.planners.placement import RULES, Used, add, gpus_of, place
from nostall.parallel.simulate import simulated_s

Floats = NDArray[np.float64]
_Sizes = Literal["any", "one", "server"]
"""GPUs that a stage may get: any number, one, or as many as a server has."""
MOST_CUTS, MANY_GPUS_CUTS = 400, 40
"""Cut positions that are looked at, on clusters of up to ``ALL_SIZES`` GPUs and on larger ones;
layers of longer models are merged."""
BEAM = 64
"""States, least latency first, that are extended at each cut on the larger clusters."""
MOST_STAGES = 24
FINALISTS = 40
"""Plans of each search, least closed form first, that are simulated."""
ALL_SIZES = 16
"""Clusters up to this size try every number of GPUs for a stage, larger ones powers of two and
whole servers."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One placement of a new stage: seconds per byte and per unit of work that it brings."""

    after: Used
    gpus: tuple[int, ...]
    rest: tuple[int, ...]


@dataclass(slots=True)
class _State:
    """Per cut: the best latency found and the plan's front part."""

    value: Floats
    rows: NDArray[np.float64]
    stages: list[tuple[Stage, ...]]


def dapple(work: Workload, effort: Effort) -> Plan:
    """The plan with the least closed-form latency that fits into memory.

    Raises :class:`Infeasible` when none does, with or without re-computation.
    """
    for recompute in (False, True) if effort.recompute else (False,):
        found = _search(work, effort, recompute)
        if found is not None:
            return found
    raise Infeasible(
        "no DAPPLE plan fits into memory, the smallest of which is "
        f"{min(work.cluster.memory) / 2**30:.3g} GiB a GPU; use more GPUs, a smaller micro-batch "
        "or a smaller --state-factor"
    )


def _search(work: Workload, effort: Effort, recompute: bool) -> Plan | None:
    everything = tuple(range(len(work.cluster)))
    alone = Plan((Stage(0, len(work.profile), everything),), "pb", recompute=recompute)
    plans = [plan for plan in [fitted(work, alone)] if plan is not None]
    searches: list[tuple[int, _Sizes]] = [(2, "any"), (MOST_STAGES, "any")]
    if 1 < len(work.cluster.servers) < min(len(everything), MOST_STAGES):
        searches.append((len(work.cluster.servers), "server"))
    if len(everything) <= MOST_STAGES:
        searches.append((len(everything), "one"))
    for most, sizes in searches:
        bound = min((closed_form(work, plan).total_s for plan in plans), default=np.inf)
        states = _states(work, effort, recompute, most, bound if sizes == "any" else np.inf, sizes)
        ranked = sorted(_complete(work, states), key=lambda pair: pair[0])
        if sizes == "one":
            ranked = [pair for pair in ranked if len(pair[1]) == len(everything)]
        for _, stages in ranked[:FINALISTS]:
            plan = fitted(work, Plan(stages, "pb", recompute=recompute))
            if plan is not None:
                plans.append(plan)
    return min(plans, key=lambda plan: simulated_s(work, plan), default=None)


def _states(
    work: Workload, effort: Effort, recompute: bool, most: int, bound: float, sizes: _Sizes
) -> dict[Used, _State]:
    """The best front part of at most ``most - 1`` stages for every (cut, GPUs in use).

    ``bound`` is the latency of a known plan.  L is at least (M - 1) times the load of any stage, so
    front parts with a heavier stage, or which leave too much for the other GPUs, are dropped.
    """
    many = len(work.cluster) > ALL_SIZES
    cuts = candidate_cuts(work, MANY_GPUS_CUTS if many else MOST_CUTS)
    tables = _Tables.of(work, cuts, recompute)
    states = {tuple(0 for _ in work.cluster.servers): _start(len(cuts))}
    steps: dict[Used, list[_Step]] = {}
    for at in range(len(cuts)):
        effort.tell(at / len(cuts), "dapple")
        here = sorted(states, key=lambda used: float(states[used].value[at]))
        for used in here[:BEAM] if many else here:
            state = states[used]
            if not np.isfinite(state.value[at]) or len(state.stages[at]) >= most - 1:
                continue
            left = tables.forward[-1] + tables.backward[-1]
            left -= tables.forward[at] + tables.backward[at]
            others = len(work.cluster) - sum(used)
            if (work.micro_batches - 1) * left / others >= bound:
                continue
            actual = _used(work, state.stages[at])
            if actual not in steps:
                steps[actual] = list(_steps(work, actual, sizes))
            for step in steps[actual]:
                found = _extend(work, tables, cuts, states, state, at, step, bound)
                bound = min(bound, found) if sizes == "any" else bound
        if effort.over:
            break
    return states


def _complete(
    work: Workload, states: dict[Used, _State]
) -> Iterator[tuple[float, tuple[Stage, ...]]]:
    """Every kept front part with its last stage, and their latency."""
    for state in states.values():
        for at in np.flatnonzero(np.isfinite(state.value)):
            front = state.stages[at]
            if front:
                taken = {g for s in front for g in s.gpus}
                rest = tuple(g for g in range(len(work.cluster)) if g not in taken)
                yield (
                    float(state.value[at]),
                    (*front, Stage(front[-1].end, len(work.profile), rest)),
                )


def _used(work: Workload, front: tuple[Stage, ...]) -> Used:
    taken = [work.cluster.server[g] for s in front for g in s.gpus]
    return tuple(taken.count(s) for s in range(len(work.cluster.servers)))


def _start(cuts: int) -> _State:
    state = _empty(cuts)
    state.value[0] = 0.0  # nothing placed yet: a state to extend, not a plan
    return state


def _empty(cuts: int) -> _State:
    rows = np.zeros((cuts, 3, 2 * MOST_STAGES + 3))
    return _State(np.full(cuts, np.inf), rows, [()] * cuts)


def _counts(work: Workload, left: int, sizes: _Sizes) -> Sequence[int]:
    """Numbers of GPUs that a next stage may get of those that are left, fewer than all."""
    cluster = work.cluster
    servers = {sum(map(len, cluster.servers[:k])) for k in range(len(cluster.servers))}
    if sizes == "any" and len(cluster) <= ALL_SIZES:
        return range(1, left)
    powers = {2**k for k in range(left.bit_length())}
    each = set(map(len, cluster.servers))
    wanted = {"any": powers | servers, "one": {1}, "server": each}[sizes]
    return sorted(n for n in wanted if 0 < n < left)


def _steps(work: Workload, used: Used, sizes: _Sizes) -> Iterator[_Step]:
    """All placements of a next stage that leave at least one GPU for the last."""
    cluster = work.cluster
    seen = set()
    for wanted in _counts(work, len(cluster) - sum(used), sizes):
        for rule in RULES:
            taken = place(cluster, used, wanted, rule)
            if taken in seen:
                continue
            seen.add(taken)
            after = add(used, taken)
            full = tuple(len(s) for s in cluster.servers)
            rest = tuple(f - a for f, a in zip(full, after, strict=True))
            yield _Step(after, gpus_of(cluster, used, taken), gpus_of(cluster, after, rest))


@dataclass(frozen=True, slots=True)
class _Tables:
    """The workload at the candidate cuts, as arrays of shape (cuts + 1,): the last is the end."""

    forward: Floats
    backward: Floats
    parameters: Floats
    held: Floats
    cut: Floats
    back: Floats
    input: Floats

    @classmethod
    def of(cls, work: Workload, cuts: Sequence[int], recompute: bool) -> _Tables:
        at = [*cuts, len(work.profile)]
        forward = np.array(work.forward)[at]
        backward = np.array(work.backward)[at] + (forward if recompute else 0.0)
        held = np.zeros(len(at)) if recompute else np.array(work.stored)[at]
        cut, back = np.array(work.cut)[at], np.array(work.cut_back)[at]
        return cls(
            forward,
            backward,
            np.array(work.parameters)[at],
            held,
            cut,
            back,
            cut if recompute else np.zeros(len(at)),
        )


def _extend(
    work: Workload,
    tables: _Tables,
    cuts: Sequence[int],
    states: dict[Used, _State],
    state: _State,
    at: int,
    step: _Step,
    bound: float,
) -> float:
    """Try every end of a new stage that begins at cut ``at``; keep what is better.

    Returns the least latency of a plan whose last stage fits into memory.
    """
    front = state.stages[at]
    key = tuple(sorted(step.after)) if work.cluster.alike else step.after
    target = states.get(key)
    if target is None:
        target = states[key] = _empty(len(cuts))
    row = state.rows[at].copy()
    n = 2 * len(front)
    if front:
        way = work.route(front[-1].gpus, step.gpus)
        row[0, n - 1] = way.latency_s + tables.cut[at] * way.s_per_byte
        row[1, n - 1] = way.latency_s + tables.back[at] * way.s_per_byte
    onward = work.route(step.gpus, step.rest)
    memory = work.cluster.memory
    better, least = _ends(
        at,
        n,
        work.micro_batches,
        row,
        target.value,
        target.rows,
        tables.forward,
        tables.backward,
        tables.parameters,
        tables.held,
        tables.cut,
        tables.back,
        tables.input,
        np.array([onward.latency_s, onward.s_per_byte]),
        np.array(_line(work, step.gpus)),
        np.array(_line(work, step.rest)),
        work.state_factor,
        min(memory[g] for g in step.gpus),
        min(memory[g] for g in step.rest),
        bound,
    )
    for end in better:
        target.stages[end] = (*front, Stage(cuts[at], cuts[end], step.gpus))
    return float(least)


def _line(work: Workload, gpus: tuple[int, ...]) -> tuple[float, float, float]:
    """Replicas, and the all-reduce's seconds at 0 and per byte."""
    start = work.allreduce_s(gpus, 1e-9)
    return float(len(gpus)), start, (work.allreduce_s(gpus, 1e9) - start) * 1e-9


@njit(cache=True)  # type: ignore[untyped-decorator]
def _ends(
    at: int,
    n: int,
    micro_batches: int,
    row: Floats,
    value: Floats,
    rows: Floats,
    forward: Floats,
    backward: Floats,
    parameters: Floats,
    held: Floats,
    cut: Floats,
    back: Floats,
    input: Floats,
    onward: Floats,
    mine: Floats,
    rest: Floats,
    state_factor: float,
    memory: float,
    rest_memory: float,
    bound: float,
) -> tuple[list[int], float]:
    """The ends at which the state gets better; writes its value and row.

    Also the least latency among plans whose last stage fits.
    """
    least = np.inf
    found = [0 for _ in range(0)]
    last = forward.shape[0] - 1
    for end in range(at + 1, last):
        size = parameters[end] - parameters[at]
        one = (held[end] - held[at] + input[at]) / mine[0]
        if state_factor * size + one > memory:
            break  # a longer stage needs more
        row[0, n] = (forward[end] - forward[at]) / mine[0]
        row[1, n] = (backward[end] - backward[at]) / mine[0]
        if (micro_batches - 1) * (row[0, n] + row[1, n]) >= bound:
            break  # so does its latency
        row[2, n] = mine[1] + size * mine[2] if mine[0] > 1 and size > 0 else 0.0
        row[0, n + 1] = onward[0] + cut[end] * onward[1]
        row[1, n + 1] = onward[0] + back[end] * onward[1]
        row[2, n + 1] = 0.0
        tail = parameters[last] - parameters[end]
        row[0, n + 2] = (forward[last] - forward[end]) / rest[0]
        row[1, n + 2] = (backward[last] - backward[end]) / rest[0]
        row[2, n + 2] = rest[1] + tail * rest[2] if rest[0] > 1 and tail > 0 else 0.0
        warm_up, steady, ending, _ = latency(row[0], row[1], row[2], n + 3, micro_batches)
        total = warm_up + steady + ending
        if total < value[end]:
            value[end] = total
            rows[end, :, : n + 1] = row[:, : n + 1]
            found.append(end)
        one = (held[last] - held[end] + input[end]) / rest[0]
        if total < least and state_factor * tail + one <= rest_memory:
            least = total
    return found, least
