"""SM issue model: the modelled time of one launch of a schedule, without a GPU."""

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
from nostall.sass.model.occupancy import Occupancy, kernel_resources, occupancy
from nostall.sass.model.parameters import SUB_CORES, SmParameters, sm_parameters
from nostall.sass.model.trace import Loop, Trace, natural_loops, trace_path, trip_counts
from nostall.sass.program.program import Function, Program
from nostall.sass.schedule.state import Schedule

KEPT_ITERATIONS = (8, 6, 5, 4, 3, 2, 1)
"""Simulated iterations of each loop: the first of these that keeps to ``MAX_ISSUES``."""

MAX_WARPS = 8
"""Simulated warps per scheduler; further resident warps count as further rounds."""

MAX_ISSUES = 6_000
"""Instructions issued in one evaluation, which keeps it under about 1 ms."""

_NO_REASONS = np.zeros((0, len(Reason)), dtype=np.float64)
_NO_LOG = np.zeros((0, 4), dtype=np.int64)
_DEADLOCK = "in the model the warps wait for each other for ever"


class Issue(NamedTuple):
    """One issued instruction of the simulated wave."""

    position: int
    instruction: int
    """Original index."""
    warp: int
    cycle: int
    reason: Reason
    """The longest wait of the warp before this issue."""


@dataclass(frozen=True)
class Explanation:
    """Modelled stall cycles of a schedule, by instruction and reason."""

    cycles: NDArray[np.float64]
    """[instructions, reasons], by original index: warp cycles that an instruction waited for, or
    spent in, a :class:`Reason`, summed over the simulated warps of one scheduler and all
    iterations."""
    reasons: tuple[str, ...]
    """Names of the columns of ``cycles``."""
    wave_cycles: float
    """Cycles of one wave of warps."""
    total_cycles: float
    """Cycles of the launch."""
    seconds: float
    """Time of the launch."""
    simulated_warps: int
    """Simulated warps per scheduler."""
    occupancy: Occupancy
    trips: dict[int, int]
    """Loop number -> trip count."""
    assumed_trips: frozenset[int]
    """Loops whose trip count is assumed."""
    short_loops: frozenset[int]
    """Loops that the modelled path runs less often than their trip count."""

    @property
    def by_reason(self) -> dict[str, float]:
        """Reason -> warp cycles of all instructions."""
        return dict(zip(self.reasons, self.cycles.sum(axis=0).tolist(), strict=True))

    def worst(self, count: int = 10) -> list[tuple[int, float, str]]:
        """(original index, warp cycles waited, main reason) of the ``count`` longest waits."""
        waits = self.cycles[:, 1:]
        total = waits.sum(axis=1)
        order = np.argsort(-total, kind="stable")[:count]
        return [
            (int(i), float(total[i]), self.reasons[1 + int(waits[i].argmax())])
            for i in order
            if total[i] > 0
        ]


class SmModel(Objective[Schedule]):
    """Modelled seconds of one launch of ``function``, as an objective over its schedules.

    The model simulates one scheduler with the warps that occupancy puts on it. It assumes that the
    other schedulers and SMs do the same at the same time and share memory evenly. The time is
    waves x cycles of a wave / nominal clock; the launch itself costs nothing.

    A few iterations of each loop are simulated and extrapolated. Compared with the model's own
    simulation of all iterations (74 launches of the example kernels on sm_80 and sm_90): with one
    simulated warp the error is at most 4 % and schedules are ranked alike; with two or more the
    median error is 1.2 %, the largest 16 %, and schedules of nearly equal cost are often ranked
    differently (median rank correlation 0.4). So small modelled gains with several warps mean
    little; more ``kept_iterations`` help. All warps take the same path, so kernels with
    specialised warps are covered only in part.
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
        parameters: SmParameters | None = None,
        kept_iterations: int | None = None,
    ) -> None:
        """Trace the kernel's path and compute its cost table.

        warps: simulated warps per scheduler; None: those of the occupancy, up to ``MAX_WARPS``
        assumed_trips: trip count of each loop that ``launch.trips`` does not name
        parameters: parameters of the architecture; None: nostall's own
        kept_iterations: simulated iterations of each loop; None: as many as ``MAX_ISSUES`` allows
        """
        for name, value in (
            ("warps", warps),
            ("assumed_trips", assumed_trips),
            ("kept_iterations", kept_iterations),
        ):
            if value is not None and value < 1:
                raise BadInput(f"{name} is {value}; it must be at least 1")
        self.flops = launch.flops
        self.parameters = sm_parameters(program.sm) if parameters is None else parameters
        resources = kernel_resources(program, function, launch, self.parameters)
        self.occupancy = occupancy(resources, launch, self.parameters)
        self.loops: tuple[Loop, ...] = natural_loops(function.blocks)
        trips, assumed_loops = trip_counts(self.loops, launch.trips, assumed_trips)
        self.trace, self.simulated_warps = self._affordable_trace(
            function, trips, assumed_loops, warps, kept_iterations
        )
        self._size = len(function.instructions)
        self._costs = cost_table(
            function.instructions,
            self.parameters,
            active_sub_cores=self.occupancy.active_sub_cores,
            active_sms=self.occupancy.active_sms,
        )
        self._group = max(1, -(-self.occupancy.resources.warps // SUB_CORES))
        self._room = np.zeros(len(Server), dtype=np.int64)
        self._room[Server.SHARED] = self.parameters.queue_shared
        self._room[Server.GLOBAL] = self.parameters.queue_global
        self._room[Server.GMMA] = self.parameters.queue_gmma
        self._delays = np.array(
            [self.parameters.barrier, self.parameters.drain, self.parameters.yield_bubble],
            dtype=np.int64,
        )
        self._rounds = self._launch_rounds(launch)
        self.provenance = MappingProxyType(self._provenance(warps is not None))

    def _affordable_trace(
        self,
        function: Function,
        trips: dict[int, int],
        assumed_loops: frozenset[int],
        warps: int | None,
        kept_iterations: int | None,
    ) -> tuple[Trace, int]:
        """A path and a number of warps with which an evaluation keeps to ``MAX_ISSUES``."""
        simulated = min(self.occupancy.warps_per_scheduler, MAX_WARPS) if warps is None else warps
        for kept in KEPT_ITERATIONS if kept_iterations is None else (kept_iterations,):
            trace = trace_path(function, self.loops, trips, assumed_loops, kept)
            if trace.complete and trace.length * simulated <= MAX_ISSUES:
                return trace, simulated
            if kept <= 3 and trace.complete:
                break
        if warps is None:
            simulated = max(1, min(simulated, MAX_ISSUES // trace.length))
        return trace, simulated

    def _launch_rounds(self, launch: LaunchSpec) -> float:
        """Number of waves of the simulated warps that the busiest SM runs."""
        blocks = self.occupancy.resident_blocks * self.occupancy.rounds
        per_scheduler = blocks * self.occupancy.resources.warps / SUB_CORES
        return max(1.0, per_scheduler / self.simulated_warps)

    def _provenance(self, warps_given: bool) -> dict[str, str]:
        counts = (
            f"{number}={count}{' assumed' if number in self.trace.assumed_loops else ''}"
            for number, count in self.trace.trips.items()
        )
        clock = self.parameters.clock_hz / 1e9
        return {
            "model": "SM issue model",
            "architecture": f"sm_{self.parameters.sm}",
            "device": f"{self.parameters.device} at {clock:g} GHz (nominal)",
            "warps_per_scheduler": str(self.occupancy.warps_per_scheduler),
            "simulated_warps": f"{self.simulated_warps}{' (given)' if warps_given else ''}",
            "limited_by": self.occupancy.limit,
            "trips": ", ".join(counts) or "no loops",
            "path": self._path_text(),
        }

    def _path_text(self) -> str:
        text = "complete" if self.trace.complete else "cut short"
        if self.trace.short_loops:
            text += f"; loops {sorted(self.trace.short_loops)} run less often than their trips"
        return text

    def evaluate(self, states: Sequence[Schedule]) -> list[Measurement]:
        return [self._measure(state) for state in states]

    def _measure(self, state: Schedule) -> Measurement:
        failure = self._illegal_reason(state)
        cycles = -1.0 if failure else self._simulate(state, _NO_REASONS, _NO_LOG)
        if cycles < 0:
            failure = failure or _DEADLOCK
            return Measurement(self.unit, (), self.kind, self.provenance, failure=failure)
        return Measurement(self.unit, (self._seconds(cycles),), self.kind, self.provenance)

    def _illegal_reason(self, state: Schedule) -> str | None:
        if len(state.order) == self._size:
            return None
        return (
            f"the schedule has {len(state.order)} instructions, the kernel {self._size}; give a "
            "schedule of this kernel"
        )

    def _seconds(self, cycles: float) -> float:
        return cycles * self._rounds / self.parameters.clock_hz

    def _simulate(
        self, state: Schedule, reasons: NDArray[np.float64], log: NDArray[np.int64]
    ) -> float:
        rows = issue.arrange_rows(self._costs, *state.arrays())
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
        """Modelled cycles of one wave; raises :class:`BadInput` if the schedule cannot run."""
        return self._checked_cycles(state, _NO_REASONS, _NO_LOG)

    def _checked_cycles(
        self, state: Schedule, reasons: NDArray[np.float64], log: NDArray[np.int64]
    ) -> float:
        failure = self._illegal_reason(state)
        cycles = -1.0 if failure else self._simulate(state, reasons, log)
        if cycles < 0:
            raise BadInput(failure or _DEADLOCK)
        return cycles

    def explain(self, state: Schedule) -> Explanation:
        """Split the modelled cycles of a schedule by instruction and reason."""
        reasons = np.zeros((self._size, len(Reason)), dtype=np.float64)
        wave = self._checked_cycles(state, reasons, _NO_LOG)
        return Explanation(
            cycles=reasons,
            reasons=tuple(reason.name.lower().replace("_", " ") for reason in Reason),
            wave_cycles=wave,
            total_cycles=wave * self._rounds,
            seconds=self._seconds(wave),
            simulated_warps=self.simulated_warps,
            occupancy=self.occupancy,
            trips=dict(self.trace.trips),
            assumed_trips=self.trace.assumed_loops,
            short_loops=self.trace.short_loops,
        )

    def timeline(self, state: Schedule) -> list[Issue]:
        """All issues of the simulated wave in order of time."""
        log = np.zeros((self.trace.length * self.simulated_warps, 4), dtype=np.int64)
        self._checked_cycles(state, _NO_REASONS, log)
        position = np.argsort(state.order, kind="stable")
        return [
            Issue(int(position[index]), index, warp, cycle, Reason(reason))
            for index, warp, cycle, reason in log.tolist()
        ]
