"""The search for attention plans: a space of kernels and table settings, and its objective."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np

from nostall.core.errors import BadInput, IllegalMove, NostallError
from nostall.core.measurement import Kind, Measurement
from nostall.core.objective import Objective
from nostall.core.space import NO_TAGS, Space, Tags
from nostall.gpu.clock import Clock, Run
from nostall.serving.attention.config import AttentionPlan, KernelConfig, Schedule, TileConfig
from nostall.serving.tables.settings import DEVICE_ORDERS

SCHEDULES: tuple[tuple[Schedule, str, float], ...] = (
    ("queue", "sorted", 1.0),
    ("queue", "paired", 0.5),
    ("queue", "paired", 0.25),
    ("ranges", "snake", 0.5),
    ("ranges", "lpt", 0.5),
)
"""Schedules whose launch does not depend on the batch, the order of units that each needs, and the
share of programs at the front."""
SPLITS = (1 << 30, 1024, 2048, 4096)
LEAST_SPLITS = (256, 512, 1024, 2048)
LEAST_PREFIXES = (0, 256, 512, 1024, 2048)
LEAST_SAVINGS = (0, 1000, 2000, 4000, 8000)
UNITS_PER_PROGRAM = (0, 1, 2, 4, 8)
FAILURES = (RuntimeError, ValueError, NostallError)
"""Errors of a plan that cannot be compiled or run."""


@dataclass(frozen=True)
class PlanMove:
    """Replace one part of a plan by another choice."""

    part: str
    choice: int

    @property
    def tags(self) -> Tags:
        return frozenset({self.part})


class PlanSpace(Space[AttentionPlan, PlanMove]):
    """Plans of given kernels with the schedules, orders and splits of this module."""

    def __init__(
        self,
        kernels: Sequence[KernelConfig],
        has_prefixes: bool = False,
        start: AttentionPlan | None = None,
    ) -> None:
        """``kernels``: their tiles, warps, registers and programs of an SM are what is searched.
        ``has_prefixes``: whether batches have prefix groups, whose tables the device builds.
        ``start``: the first plan of a search; None: the first kernel with the defaults of plans.
        Raises :class:`BadInput` without kernels."""
        if not kernels:
            raise BadInput("the space of plans got no kernel; give one or more")
        self._start = start
        self.choices: dict[str, Sequence[Any]] = {
            "kernel": tuple(
                dict.fromkeys(replace(k, schedule="queue", front_share=1.0) for k in kernels)
            ),
            "schedule": tuple(s for s in SCHEDULES if not has_prefixes or s[1] in DEVICE_ORDERS),
            "split": SPLITS,
            "least_split": LEAST_SPLITS,
            "units_per_program": UNITS_PER_PROGRAM,
        }
        if has_prefixes:
            self.choices["least_prefix"] = LEAST_PREFIXES
            self.choices["least_saved_ns"] = LEAST_SAVINGS

    def start(self) -> AttentionPlan:
        return self._start or AttentionPlan(self.choices["kernel"][0], "sorted")

    def moves(self, state: AttentionPlan) -> Iterator[PlanMove]:
        for part, choices in self.choices.items():
            for choice in range(len(choices)):
                move = PlanMove(part, choice)
                if self._replaced(state, move) != state:
                    yield move

    def draw(
        self, state: AttentionPlan, rng: np.random.Generator, required_tags: Tags = NO_TAGS
    ) -> PlanMove | None:
        conceivable = [
            PlanMove(part, choice)
            for part, choices in self.choices.items()
            if required_tags <= {part}
            for choice in range(len(choices))
        ]
        if not conceivable:
            return None
        move = conceivable[int(rng.integers(len(conceivable)))]
        return None if self._replaced(state, move) == state else move

    def apply(self, state: AttentionPlan, move: PlanMove) -> AttentionPlan:
        known = move.choice in range(len(self.choices.get(move.part, ())))
        changed = self._replaced(state, move) if known else state
        if changed == state:
            raise IllegalMove(f"{move} does not change the plan; take a move of moves()")
        return changed

    def key(self, state: AttentionPlan) -> bytes:
        return self.dump(state).encode()

    def dump(self, state: AttentionPlan) -> str:
        return json.dumps(plan_fields(state), sort_keys=True)

    def load(self, text: str) -> AttentionPlan:
        return plan_of(json.loads(text))

    def _replaced(self, state: AttentionPlan, move: PlanMove) -> AttentionPlan:
        """The plan with a part replaced; the same plan if its kernel does not run so."""
        choice = self.choices[move.part][move.choice]
        try:
            if move.part == "kernel":
                kept = {
                    "schedule": state.kernel.schedule,
                    "front_share": state.kernel.front_share,
                }
                return replace(state, kernel=replace(choice, **kept))
            if move.part == "schedule":
                schedule, order, front_share = choice
                kernel = replace(state.kernel, schedule=schedule, front_share=front_share)
                return replace(state, kernel=kernel, order=order)
        except BadInput:  # The Gluon kernel does not know all schedules.
            return state
        return replace(state, **{move.part: choice})


FRONT_SHARE, STORED_FRONT_SHARE = "front_share", "front"
"""A field of :class:`KernelConfig`, and its key in stored plans."""


def plan_fields(plan: AttentionPlan) -> dict[str, Any]:
    """The fields of a plan as they are stored; :func:`plan_of` reads them."""
    data = asdict(plan)
    data["kernel"] = _renamed(data["kernel"], FRONT_SHARE, STORED_FRONT_SHARE)
    return data


def _renamed(kernel: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if name == old else name: value for name, value in kernel.items()}


def plan_of(data: dict[str, Any]) -> AttentionPlan:
    """A plan from the JSON of its fields. Raises :class:`BadInput` if a field is missing or new."""
    try:
        kernel = _renamed(data["kernel"], STORED_FRONT_SHARE, FRONT_SHARE)
        kernel["tiles"] = tuple(TileConfig(*tile) for tile in kernel["tiles"])
        return AttentionPlan(**{**data, "kernel": KernelConfig(**kernel)})
    except (KeyError, TypeError) as error:
        names = ", ".join(field.name for field in fields(AttentionPlan))
        raise BadInput(f"the plan {str(data)[:80]}: {error}; its fields are {names}") from error


class PlanObjective(Objective[AttentionPlan]):
    """Measured time of one batch by a plan, in seconds."""

    kind: ClassVar[Kind] = "measured"
    unit: ClassVar[str] = "s"

    def __init__(
        self,
        make_run: Callable[[AttentionPlan], Run],
        clock: Clock,
        provenance: dict[str, str],
        seconds: float = 0.2,
    ) -> None:
        """``make_run`` builds the tables of a plan and returns its launch, whose result is checked;
        it raises an error of :data:`FAILURES` if the plan cannot run or its result is wrong."""
        self.make_run, self.clock, self.seconds = make_run, clock, seconds
        self.provenance = provenance

    def evaluate(self, states: Sequence[AttentionPlan]) -> list[Measurement]:
        """Measure plans in one interleaved series."""
        runs: dict[int, Run] = {}
        failures: dict[int, str] = {}
        for index, state in enumerate(states):
            try:
                runs[index] = self.make_run(state)
            except FAILURES as error:
                failures[index] = f"{type(error).__name__}: {str(error)[:200]}"
        key = " ".join(map(str, states))
        rows = self.clock.samples(key, list(runs.values()), self.seconds) if runs else []
        samples = dict(zip(runs, rows, strict=True))
        return [
            Measurement(
                self.unit,
                tuple(samples.get(index, ())),
                self.kind,
                self.provenance,
                failures.get(index),
            )
            for index in range(len(states))
        ]
