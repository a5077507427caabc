"""What a schedule would cost: a modelled time for one launch, without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nostall.core.errors import BadInput
from nostall.core.launch import LaunchSpec
from nostall.core.measurement import Kind, Measurement
from nostall.core.objective import Objective
from nostall.sass.model import issue
from nostall.sass.model.costs import Server, cost_table
from nostall.sass.model.issue import Reason
from nostall.sass.model.loops import Loop, natural_loops
from nostall.sass.model.occupancy import Occupancy, occupancy, resources
from nostall.sass.model.parameters import SUB_CORES, SmParameters, parameters
from nostall.sass.model.trace import Trace, trip_counts, walk
from nostall.sass.program.program import Function, Program
from nostall.sass.schedule.state import Schedule

KEEP = (8, 6, 5, 4, 3, 2, 1)
"""Iterations of a loop that are simulated; the first choice that keeps the budget."""

MOST_WARPS = 8
"""Warps per scheduler that are simulated; more residents count as further rounds."""

ISSUES = 6_000
"""Instructions that one evaluation may issue; keeps it under about a millisecond."""

_NO_REASONS = np.zeros((0, len(Reason)), dtype=np.float64)
_NO_LOG = np.zeros((0, 4), dtype=np.int64)


class Issue(NamedTuple):
    """One issued instruction of the simulated wave; ``instruction`` is its original index and
    ``reason`` what the warp waited for longest before it."""

    position: int
    instruction: int
    warp: int
    cycle: int
    reason: Reason


@dataclass(frozen=True)
class Explanation:
    """Where the modelled time goes.

    ``cycles[i, r]``: warp cycles that instruction ``i`` (original index) waited for, or spent in,
    :class:`Reason` ``r``, summed over the simulated warps of one scheduler and all iterations.
    ``short_loops``: loops that the modelled path runs less often than ``trips`` says.
    ``wave_cycles``: cycles of one wave of warps; ``total_cycles``: of the whole launch.
    """

    cycles: NDArray[np.float64]
    reasons: tuple[str, ...]
    wave_cycles: float
    total_cycles: float
    seconds: float
    simulated_warps: int
    occupancy: Occupancy
    trips: dict[int, int]
    assumed_trips: frozenset[int]
    short_loops: frozenset[int]

    @property
    def by_reason(self) -> dict[str, float]:
        """Warp cycles by reason over the whole kernel."""
        return dict(zip(self.reasons, self.cycles.sum(axis=0).tolist(), strict=True))

    def worst(self, count: int = 10) -> list[tuple[int, float, str]]:
        """(original index, warp cycles waited, main reason) of the longest waits."""
        waits = self.cycles[:, 1:]
        total = waits.sum(axis=1)
        order = np.argsort(-total, kind="stable")[:count]
        return [
            (int(i), float(total[i]), self.reasons[1 + int(waits[i].argmax())])
            for i in order
            if total[i] > 0
        ]


class SmModel(Objective[Schedule]):
    """The SM issue model as an objective: seconds of one launch of ``function``, modelled.

    One scheduler is simulated with the warps that occupancy puts on it; the others of the SM and
    the other SMs are taken to do the same at the same time and to share memory evenly.  Time is
    waves x cycles of a wave / nominal clock; the launch itself costs nothing.

    Loops are simulated for a few iterations and extrapolated.  Against its own simulation of all
    iterations (74 launches of the example kernels on sm_80 and sm_90): with one simulated warp at
    most 4 % off and schedules ranked alike; with two or more, median 1.2 % and at most 16 % off,
    and schedules of nearly equal cost are often ranked differently (median rank correlation 0.4).
    Small modelled gains with several warps therefore mean little; a larger ``keep`` helps.
    All warps take the same path, so kernels with specialised warps are covered in part only.

    ``warps`` overrides the simulated warps per scheduler; ``assumed_trips`` is for loops whose
    count ``launch.trips`` does not give; ``table`` replaces the architecture's parameters; ``keep``
    is the number of loop iterations to simulate (None: as many as the budget allows).
    """

    kind: ClassVar[Kind] = "modelled"
    unit: ClassVar[str] = "s"

    def __init__(
        self,
        program: Program,
        function: Function,
        launch: LaunchSpec,
        *,
        warps: int | None = None,
        assumed_trips: int = 8,
        table: SmParameters | None = None,
        keep: int | None = None,
    ) -> None:
        for name, value in (("warps", warps), ("assumed_trips", assumed_trips), ("keep", keep)):
            if value is not None and value < 1:
                raise BadInput(f"{name} is {value}; it must be at least 1")
        self.flops = launch.flops
        self.table = parameters(program.sm) if table is None else table
        self.occupancy = occupancy(
            resources(program, function, launch, self.table), launch, self.table
        )
        self.loops: tuple[Loop, ...] = natural_loops(function.blocks)
        trips, assumed = trip_counts(self.loops, launch.trips, assumed_trips)
        self.trace, self.simulated_warps = self._affordable(function, trips, assumed, warps, keep)
        self._size = len(function.instructions)
        self._costs = cost_table(
            function.instructions,
            self.table,
            active_sub_cores=self.occupancy.active_sub_cores,
            active_sms=self.occupancy.active_sms,
        )
        self._group = max(1, -(-self.occupancy.resources.warps // SUB_CORES))
        self._room = np.zeros(len(Server), dtype=np.int64)
        self._room[Server.SHARED] = self.table.queue_shared
        self._room[Server.GLOBAL] = self.table.queue_global
        self._room[Server.GMMA] = self.table.queue_gmma
        self._delays = np.array(
            [self.table.barrier, self.table.drain, self.table.yield_bubble], dtype=np.int64
        )
        self._rounds = self._launch_rounds(launch)
        self.provenance = MappingProxyType(self._describe(warps is not None))

    def _affordable(
        self,
        function: Function,
        trips: dict[int, int],
        assumed: frozenset[int],
        warps: int | None,
        keep: int | None,
    ) -> tuple[Trace, int]:
        """A path and a number of warps that keep an evaluation within :data:`ISSUES`."""
        wanted = min(self.occupancy.warps_per_scheduler, MOST_WARPS) if warps is None else warps
        for kept in KEEP if keep is None else (keep,):
            trace = walk(function, self.loops, trips, assumed, kept)
            if trace.complete and trace.length * wanted <= ISSUES:
                return trace, wanted
            if kept <= 3 and trace.complete:
                break
        if warps is None:
            wanted = max(1, min(wanted, ISSUES // trace.length))
        return trace, wanted

    def _launch_rounds(self, launch: LaunchSpec) -> float:
        """How many waves of the simulated warps the busiest SM runs."""
        blocks = self.occupancy.resident_blocks * self.occupancy.rounds
        per_scheduler = blocks * self.occupancy.resources.warps / SUB_CORES
        return max(1.0, per_scheduler / self.simulated_warps)

    def _describe(self, given: bool) -> dict[str, str]:
        counts = (
            f"{number}={count}{' assumed' if number in self.trace.assumed else ''}"
            for number, count in self.trace.trips.items()
        )
        return {
            "model": "SM issue model",
            "architecture": f"sm_{self.table.sm}",
            "device": f"{self.table.device} at {self.table.clock_hz / 1e9:g} GHz (nominal)",
            "warps_per_scheduler": str(self.occupancy.warps_per_scheduler),
            "simulated_warps": f"{self.simulated_warps}{' (given)' if given else ''}",
            "limited_by": self.occupancy.limit,
            "trips": ", ".join(counts) or "no loops",
            "path": self._path(),
        }

    def _path(self) -> str:
        said = "complete" if self.trace.complete else "cut short"
        if self.trace.short:
            said += f"; loops {sorted(self.trace.short)} run less often than their trips"
        return said

    def evaluate(self, states: Sequence[Schedule]) -> list[Measurement]:
        return [self._measure(state) for state in states]

    def _measure(self, state: Schedule) -> Measurement:
        wrong = self._refusal(state)
        cycles = -1.0 if wrong else self._simulate(state, _NO_REASONS, _NO_LOG)
        if cycles < 0:
            why = wrong or "in the model the warps wait for each other for ever"
            return Measurement(self.unit, (), self.kind, self.provenance, failure=why)
        return Measurement(self.unit, (self._seconds(cycles),), self.kind, self.provenance)

    def _refusal(self, state: Schedule) -> str | None:
        if len(state.order) == self._size:
            return None
        return (
            f"the schedule has {len(state.order)} instructions, the kernel {self._size}; give a "
            "schedule of this kernel"
        )

    def _seconds(self, cycles: float) -> float:
        return cycles * self._rounds / self.table.clock_hz

    def _simulate(
        self, state: Schedule, reasons: NDArray[np.float64], log: NDArray[np.int64]
    ) -> float:
        rows = issue.place(self._costs, *state.arrays())
        return float(
            issue.simulate(
                rows,
                state.order,
                self.trace.visits,
                self.trace.weights,
                self.simulated_warps,
                self._group,
                self._room,
                self._delays,
                reasons,
                log,
            )
        )

    def cycles(self, state: Schedule) -> float:
        """Modelled cycles of one wave; raises :class:`BadInput` for a schedule that has none."""
        return self._checked(state, _NO_REASONS, _NO_LOG)

    def _checked(
        self, state: Schedule, reasons: NDArray[np.float64], log: NDArray[np.int64]
    ) -> float:
        wrong = self._refusal(state)
        cycles = -1.0 if wrong else self._simulate(state, reasons, log)
        if cycles < 0:
            raise BadInput(wrong or "in the model the warps wait for each other for ever")
        return cycles

    def explain(self, state: Schedule) -> Explanation:
        """Where the time goes, by instruction and reason."""
        reasons = np.zeros((self._size, len(Reason)), dtype=np.float64)
        wave = self._checked(state, reasons, _NO_LOG)
        return Explanation(
            cycles=reasons,
            reasons=tuple(reason.name.lower().replace("_", " ") for reason in Reason),
            wave_cycles=wave,
            total_cycles=wave * self._rounds,
            seconds=self._seconds(wave),
            simulated_warps=self.simulated_warps,
            occupancy=self.occupancy,
            trips=dict(self.trace.trips),
            assumed_trips=self.trace.assumed,
            short_loops=self.trace.short,
        )

    def timeline(self, state: Schedule) -> list[Issue]:
        """Every issue of the simulated wave in order of time, with what the warp waited for."""
        log = np.zeros((self.trace.length * self.simulated_warps, 4), dtype=np.int64)
        self._checked(state, _NO_REASONS, log)
        position = np.argsort(state.order, kind="stable")
        return [
            Issue(int(position[index]), index, warp, cycle, Reason(reason))
            for index, warp, cycle, reason in log.tolist()
        ]
