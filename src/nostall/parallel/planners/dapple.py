"""DAPPLE's planner (arXiv:2007.01045, section 4): dynamic programming over layers and GPUs.

T(j, m, g) is the latency of a plan whose first j layers are placed on the m GPUs g and whose other
layers are one stage on all other GPUs (equations 4, 5).  A step splits that last stage at j' and
gives the layers before j' to a new stage of m' GPUs, placed by each of three rules; each state
keeps its best plan.  Pure data parallelism with overlapped all-reduce is the plan without steps.

The paper leaves some points open; this planner decides them as follows.

- D is the number of micro-batches that fits into memory; a stage that cannot hold one is rejected.
- The plan runs with PB warm-up, because the closed form holds for PB.
- The closed form does not model boundaries that share a network port.  Therefore four searches run,
  and the simulator chooses among the plans that they rank first: at most two stages ("as few stages
  as possible"); any number of stages; one server per stage, because T overestimates partial plans
  of this kind (it counts the remaining GPUs as one stage whose all-reduce crosses the network); and
  one GPU per stage ("straight").

DAPPLE's three device placement policies for a new stage (section 4.2).

GPUs of a server are interchangeable here: the state is the number of used GPUs of each server, and
within a server GPUs are taken in the order of their numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, NamedTuple, get_args

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.parallel.cluster import Cluster
from nostall.parallel.plan import Plan, Stage, Workload
from nostall.parallel.planners.closed_form import closed_form, latency
from nostall.parallel.planners.cut_positions import candidate_cuts
from nostall.parallel.planners.effort import Effort
from nostall.parallel.planners.fastest import fastest, fastest_or_cheap
from nostall.parallel.planners.memory_fit import fit_to_memory

PlacementRule = Literal["fresh first", "append first", "scatter first"]
RULES: tuple[PlacementRule, ...] = get_args(PlacementRule)
GpuCounts = tuple[int, ...]
"""Number of GPUs per server."""


def place(cluster: Cluster, used: GpuCounts, count: int, rule: PlacementRule) -> GpuCounts:
    """Number of GPUs of each server that a new stage of ``count`` GPUs gets.

    "fresh first" fills unused servers, "append first" fills partly used ones, "scatter first" takes
    GPUs evenly from the used servers, or from all servers if none is used.  GPUs that the preferred
    servers cannot give are taken from the other servers in order.
    """
    free = [len(gpus) - u for gpus, u in zip(cluster.servers, used, strict=True)]
    fresh = [s for s, u in enumerate(used) if u == 0]
    partly_used = [s for s, u in enumerate(used) if u > 0]
    taken = [0] * len(free)
    if rule == "scatter first":
        for servers in (partly_used, fresh):
            while count and any(free[s] for s in servers):
                for s in servers:
                    if count and free[s]:
                        taken[s], free[s], count = taken[s] + 1, free[s] - 1, count - 1
        return tuple(taken)
    for s in [*fresh, *partly_used] if rule == "fresh first" else [*partly_used, *fresh]:
        taken[s] = min(count, free[s])
        count -= taken[s]
    return tuple(taken)


def placed_gpus(cluster: Cluster, used: GpuCounts, taken: GpuCounts) -> tuple[int, ...]:
    """Numbers of the GPUs that ``taken`` denotes after the first ``used`` of each server."""
    return tuple(
        gpu
        for gpus, u, t in zip(cluster.servers, used, taken, strict=True)
        for gpu in gpus[u : u + t]
    )


def add_counts(used: GpuCounts, taken: GpuCounts) -> GpuCounts:
    """Sums per server."""
    return tuple(u + t for u, t in zip(used, taken, strict=True))


Floats = NDArray[np.float64]
_GroupSizes = Literal["any", "one", "server"]
"""GPUs that a stage may get: any number, one, or as many as a server has."""
MAX_CUTS, MAX_CUTS_LARGE_CLUSTER = 400, 40
"""Cut positions that are tried on clusters of up to ``ALL_SIZES`` GPUs and on larger ones; layers
of longer models are merged."""
BEAM_WIDTH = 64
"""States with the least latency that are extended at each cut on the larger clusters."""
MAX_STAGES = 24
FINALISTS = 40
"""Plans of each search that are simulated: those that fit, with the least closed-form latency."""
ALL_SIZES = 16
"""Clusters of up to this many GPUs try every number of GPUs for a stage; larger ones try powers of
two and whole servers."""


class _CutArrays(NamedTuple):
    """The workload at the candidate cuts; the last entry is the end.  Shape (cuts + 1,)."""

    forward: Floats
    """Seconds of a micro-batch's forward pass through the layers before each cut, on one GPU."""
    backward: Floats
    """Seconds of the backward pass, including the repeated forward pass of re-computation."""
    parameters: Floats
    """Bytes of parameters of the layers before each cut."""
    held: Floats
    """Bytes that a micro-batch keeps in the layers before each cut; 0 with re-computation."""
    cut: Floats
    """Bytes sent forward over each cut."""
    gradient: Floats
    """Bytes sent back over each cut."""
    stage_input: Floats
    """Bytes of its input that a stage which begins at the cut keeps; 0 without re-computation."""


class _GroupCosts(NamedTuple):
    """A group of GPUs that runs a stage."""

    share: float
    """Part of a micro-batch that a GPU of the group runs."""
    allreduce_start: float
    """Seconds of an all-reduce at size 0."""
    allreduce_s_per_byte: float
    memory: float
    """Bytes of the group's smallest GPU."""


class _StepCosts(NamedTuple):
    """A new stage, the stage of all remaining GPUs, and the route between them."""

    new: _GroupCosts
    rest: _GroupCosts
    route_latency: float
    route_s_per_byte: float


@dataclass(frozen=True, slots=True)
class _Step:
    """One placement of a new stage; all GPUs that are still unused run the last stage."""

    used: GpuCounts
    """GPUs in use after the step, per server."""
    gpus: tuple[int, ...]
    """GPUs of the new stage."""
    costs: _StepCosts


@dataclass(slots=True)
class _State:
    """The best partial plan up to each cut, among those with the same GPUs in use."""

    value: Floats
    """T: latency in seconds with all other layers in one stage on all other GPUs, (cuts,)."""
    sequences: Floats
    """Forward, backward and all-reduce seconds of compute and network stages, (cuts, 3, n)."""
    stages: list[tuple[Stage, ...]]

    @classmethod
    def empty(cls, cuts: int) -> _State:
        sequences = np.zeros((cuts, 3, 2 * MAX_STAGES + 3))
        return cls(np.full(cuts, np.inf), sequences, [()] * cuts)


@dataclass(frozen=True, slots=True)
class _Search:
    """One search and its results so far."""

    workload: Workload
    cuts: list[int]
    arrays: _CutArrays
    max_stages: int
    sizes: _GroupSizes
    states: dict[GpuCounts, _State] = field(default_factory=dict)


def dapple(workload: Workload, effort: Effort) -> Plan:
    """Of plans with the least closed-form latency and cheap ones, that of least simulated time.

    Raises :class:`Infeasible` if no plan fits into memory, with or without re-computation.
    """
    found = None
    for recompute in effort.recompute_options:
        found = found or _best_plan(workload, effort, recompute)
    if (plan := fastest_or_cheap(workload, found, effort)) is not None:
        return plan
    raise effort.no_plan(
        "no DAPPLE plan fits into memory, the smallest of which is "
        f"{min(workload.cluster.memory) / 2**30:.3g} GiB per GPU; use more GPUs, a smaller "
        "micro-batch or a smaller --state-factor"
    )


def _best_plan(workload: Workload, effort: Effort, recompute: bool) -> Plan | None:
    gpus = tuple(range(len(workload.cluster)))
    data_parallel = Plan((Stage(0, len(workload.profile), gpus),), "pb", recompute=recompute)
    plans = [plan for plan in [fit_to_memory(workload, data_parallel)] if plan is not None]
    for max_stages, sizes in _searches(workload):
        bound = np.inf
        if sizes == "any":
            bound = min((closed_form(workload, plan).total_s for plan in plans), default=np.inf)
        search = _new_search(workload, recompute, max_stages, sizes)
        _run_search(search, effort, bound)
        ranked = sorted(_complete_plans(search), key=lambda pair: pair[0])
        if sizes == "one":
            ranked = [pair for pair in ranked if len(pair[1]) == len(gpus)]
        tried = (s for at, (_, s) in enumerate(ranked) if at < FINALISTS or not effort.is_over)
        fitted = (fit_to_memory(workload, Plan(s, "pb", recompute=recompute)) for s in tried)
        plans += islice(filter(None, fitted), FINALISTS)
    return fastest(workload, plans, effort)


def _searches(workload: Workload) -> list[tuple[int, _GroupSizes]]:
    """Maximum number of stages and group sizes of each search."""
    gpus, servers = len(workload.cluster), len(workload.cluster.servers)
    searches: list[tuple[int, _GroupSizes]] = [(2, "any"), (MAX_STAGES, "any")]
    if 1 < servers < min(gpus, MAX_STAGES):
        searches.append((servers, "server"))
    if gpus <= MAX_STAGES:
        searches.append((gpus, "one"))
    return searches


def _new_search(
    workload: Workload, recompute: bool, max_stages: int, sizes: _GroupSizes
) -> _Search:
    is_large = len(workload.cluster) > ALL_SIZES
    cuts = candidate_cuts(workload, MAX_CUTS_LARGE_CLUSTER if is_large else MAX_CUTS)
    search = _Search(workload, cuts, _cut_arrays(workload, cuts, recompute), max_stages, sizes)
    start = _State.empty(len(cuts))
    start.value[0] = 0.0  # nothing is placed: a state to extend, not a plan
    search.states[tuple(0 for _ in workload.cluster.servers)] = start
    return search


def _cut_arrays(workload: Workload, cuts: Sequence[int], recompute: bool) -> _CutArrays:
    boundaries = [*cuts, len(workload.profile)]
    forward = np.array(workload.forward_s)[boundaries]
    cut_bytes = np.array(workload.cut_bytes)[boundaries]
    return _CutArrays(
        forward,
        np.array(workload.backward_s)[boundaries] + (forward if recompute else 0.0),
        np.array(workload.parameter_bytes)[boundaries],
        np.zeros(len(boundaries)) if recompute else np.array(workload.stored_bytes)[boundaries],
        cut_bytes,
        np.array(workload.gradient_bytes)[boundaries],
        cut_bytes if recompute else np.zeros(len(boundaries)),
    )


def _run_search(search: _Search, effort: Effort, bound: float) -> None:
    """Fill ``search.states``: the best partial plan for every cut and GPUs in use.

    ``bound`` is the latency of a known plan.  L is at least (M - 1) times the load of any stage, so
    partial plans with a heavier stage, or that leave too much for the other GPUs, are dropped.
    """
    workload, arrays, states = search.workload, search.arrays, search.states
    is_large = len(workload.cluster) > ALL_SIZES
    steps: dict[GpuCounts, list[_Step]] = {}
    for cut in range(len(search.cuts)):
        effort.report_progress(cut / len(search.cuts), "dapple")
        by_latency = sorted(states, key=lambda used: float(states[used].value[cut]))
        for used in by_latency[:BEAM_WIDTH] if is_large else by_latency:
            state = states[used]
            if not np.isfinite(state.value[cut]) or len(state.stages[cut]) >= search.max_stages - 1:
                continue
            remaining_s = arrays.forward[-1] + arrays.backward[-1]
            remaining_s -= arrays.forward[cut] + arrays.backward[cut]
            unused = len(workload.cluster) - sum(used)
            if (workload.micro_batches - 1) * remaining_s / unused >= bound:
                continue
            actual = _used_gpus(workload, state.stages[cut])
            if actual not in steps:
                steps[actual] = list(_steps(workload, actual, search.sizes, effort))
            if effort.is_over:
                return
            for step in steps[actual]:
                least = _extend(search, state, cut, step, bound)
                bound = min(bound, least) if search.sizes == "any" else bound


def _complete_plans(search: _Search) -> Iterator[tuple[float, tuple[Stage, ...]]]:
    """Latency and stages of each partial plan with its last stage added."""
    workload = search.workload
    for state in search.states.values():
        for cut in np.flatnonzero(np.isfinite(state.value)):
            placed = state.stages[cut]
            if placed:
                used = {g for s in placed for g in s.gpus}
                rest = tuple(g for g in range(len(workload.cluster)) if g not in used)
                last = Stage(placed[-1].end, len(workload.profile), rest)
                yield float(state.value[cut]), (*placed, last)


def _used_gpus(workload: Workload, stages: tuple[Stage, ...]) -> GpuCounts:
    servers = [workload.cluster.server[g] for s in stages for g in s.gpus]
    return tuple(servers.count(s) for s in range(len(workload.cluster.servers)))


def _group_sizes(workload: Workload, unused: int, sizes: _GroupSizes) -> Sequence[int]:
    """Numbers of GPUs that the next stage may get of ``unused`` ones, fewer than all."""
    cluster = workload.cluster
    whole_servers = {sum(map(len, cluster.servers[:k])) for k in range(len(cluster.servers))}
    if sizes == "any" and len(cluster) <= ALL_SIZES:
        return range(1, unused)
    powers = {2**k for k in range(unused.bit_length())}
    one_server = set(map(len, cluster.servers))
    allowed = {"any": powers | whole_servers, "one": {1}, "server": one_server}[sizes]
    return sorted(n for n in allowed if 0 < n < unused)


def _steps(
    workload: Workload, used: GpuCounts, sizes: _GroupSizes, effort: Effort
) -> Iterator[_Step]:
    """All distinct placements of a next stage that leave at least one GPU for the last stage.

    At the time limit the others are left out.
    """
    cluster = workload.cluster
    seen = set()
    for size in _group_sizes(workload, len(cluster) - sum(used), sizes):
        for rule in RULES:
            if effort.is_over:
                return
            taken = place(cluster, used, size, rule)
            if taken in seen:
                continue
            seen.add(taken)
            used_after = add_counts(used, taken)
            rest = tuple(len(s) - u for s, u in zip(cluster.servers, used_after, strict=True))
            gpus = placed_gpus(cluster, used, taken)
            rest_gpus = placed_gpus(cluster, used_after, rest)
            yield _Step(used_after, gpus, _step_costs(workload, gpus, rest_gpus))


def _step_costs(
    workload: Workload, gpus: tuple[int, ...], rest_gpus: tuple[int, ...]
) -> _StepCosts:
    route = workload.route(gpus, rest_gpus)
    return _StepCosts(
        _group_costs(workload, gpus),
        _group_costs(workload, rest_gpus),
        route.latency_s,
        route.s_per_byte,
    )


def _group_costs(workload: Workload, gpus: tuple[int, ...]) -> _GroupCosts:
    memory = min(workload.cluster.memory[g] for g in gpus)
    return _GroupCosts(workload.slice_share(len(gpus)), *workload.allreduce_line(gpus), memory)


def _extend(search: _Search, state: _State, cut: int, step: _Step, bound: float) -> float:
    """Try every end of a new stage that begins at ``cut``; keep what improves the target state.

    Returns the least latency in seconds of a plan whose last stage fits into memory.
    """
    workload, arrays = search.workload, search.arrays
    placed = state.stages[cut]
    key = tuple(sorted(step.used)) if workload.cluster.is_symmetric else step.used
    target = search.states.get(key)
    if target is None:
        target = search.states[key] = _State.empty(len(search.cuts))
    sequence = state.sequences[cut].copy()
    n = 2 * len(placed)
    if placed:
        route = workload.route(placed[-1].gpus, step.gpus)
        sequence[0, n - 1] = route.latency_s + arrays.cut[cut] * route.s_per_byte
        sequence[1, n - 1] = route.latency_s + arrays.gradient[cut] * route.s_per_byte
    better, least = _improve(
        cut,
        n,
        workload.micro_batches,
        bound,
        workload.state_factor,
        sequence,
        target.value,
        target.sequences,
        arrays,
        step.costs,
    )
    for end in better:
        target.stages[end] = (*placed, Stage(search.cuts[cut], search.cuts[end], step.gpus))
    return float(least)


@njit(cache=True)  # type: ignore[untyped-decorator]
def _improve(
    cut: int,
    n: int,
    micro_batches: int,
    bound: float,
    state_factor: float,
    sequence: Floats,
    value: Floats,
    sequences: Floats,
    cuts: _CutArrays,
    step: _StepCosts,
) -> tuple[list[int], float]:
    """Try every end of a stage that begins at ``cut`` as entry ``n`` of ``sequence``.

    Writes improvements to ``value`` and ``sequences``, the arrays of a :class:`_State`.  Returns
    the ends that improved, and the least latency of a plan whose last stage fits into memory.
    """
    new, rest = step.new, step.rest
    least = np.inf
    better = [0 for _ in range(0)]
    last = cuts.forward.shape[0] - 1
    for end in range(cut + 1, last):
        size = cuts.parameters[end] - cuts.parameters[cut]
        held = (cuts.held[end] - cuts.held[cut] + cuts.stage_input[cut]) * new.share
        if state_factor * size + held > new.memory:
            break  # a longer stage needs more memory
        sequence[0, n] = (cuts.forward[end] - cuts.forward[cut]) * new.share
        sequence[1, n] = (cuts.backward[end] - cuts.backward[cut]) * new.share
        if (micro_batches - 1) * (sequence[0, n] + sequence[1, n]) >= bound:
            break  # a longer stage takes more time
        sequence[2, n] = _allreduce_s(new, size)
        sequence[0, n + 1] = step.route_latency + cuts.cut[end] * step.route_s_per_byte
        sequence[1, n + 1] = step.route_latency + cuts.gradient[end] * step.route_s_per_byte
        sequence[2, n + 1] = 0.0
        rest_size = cuts.parameters[last] - cuts.parameters[end]
        sequence[0, n + 2] = (cuts.forward[last] - cuts.forward[end]) * rest.share
        sequence[1, n + 2] = (cuts.backward[last] - cuts.backward[end]) * rest.share
        sequence[2, n + 2] = _allreduce_s(rest, rest_size)
        warm_up, steady, ending, _ = latency(
            sequence[0], sequence[1], sequence[2], n + 3, micro_batches
        )
        total = warm_up + steady + ending
        if total < value[end]:
            value[end] = total
            sequences[end, :, : n + 1] = sequence[:, : n + 1]
            better.append(end)
        held = (cuts.held[last] - cuts.held[end] + cuts.stage_input[end]) * rest.share
        if total < least and state_factor * rest_size + held <= rest.memory:
            least = total
    return better, least


@njit(cache=True)  # type: ignore[untyped-decorator]
def _allreduce_s(group: _GroupCosts, size: float) -> float:
    if group.allreduce_s_per_byte > 0 and size > 0:
        return group.allreduce_start + size * group.allreduce_s_per_byte
    return 0.0
