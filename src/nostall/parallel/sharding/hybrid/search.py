"""Search for a pipeline whose stages are sharded: a cost table and a dynamic program.

The table has the modelled seconds of each (first layer, end, devices), those of the stage's best
sharding on that many GPUs for one micro-batch, forward and backward pass together.  As in Alpa
(OSDI 2022, section 5), the program finds for each limit on the slowest stage the stages with the
least sum; a step takes the sum plus the slowest stage for each further micro-batch.  A pure
pipeline (one GPU a stage) and a pure sharding (one stage) are among the plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from nostall.parallel.errors import Infeasible

KINDS = ("sharding", "pipeline", "hybrid")
"""One stage, stages of one GPU each, and all others."""
Key = tuple[int, int, int]
"""First layer, end, and devices."""


@dataclass(frozen=True, slots=True)
class HybridStage:
    """Layers ``first`` to ``end`` (exclusive) on consecutive GPUs."""

    first: int
    end: int
    devices: int
    seconds: float
    """Of one micro-batch, with the transfers to the next stage and back."""


@dataclass(frozen=True)
class HybridPlan:
    """Stages from the first layer to the last, on all GPUs."""

    stages: tuple[HybridStage, ...]
    micro_batches: int

    @property
    def step_s(self) -> float:
        """Modelled seconds of a step."""
        seconds = [stage.seconds for stage in self.stages]
        return sum(seconds) + (self.micro_batches - 1) * max(seconds)

    @property
    def kind(self) -> str:
        """``sharding``, ``pipeline`` or ``hybrid``."""
        if len(self.stages) == 1:
            return "sharding"
        return "pipeline" if all(s.devices == 1 for s in self.stages) else "hybrid"


def stage_sizes(devices: int) -> list[int]:
    """Numbers of GPUs that a stage may have: the powers of two that divide all GPUs."""
    return [1 << i for i in range(devices.bit_length()) if devices % (1 << i) == 0]


def cost_table(
    layers: int, devices: int, price: Callable[[int, int, int], float | None]
) -> dict[Key, float]:
    """The table of all stages on 1, 2, 4, ... GPUs; ``price`` is None for what is impossible.

    All layers take all GPUs, and fewer layers take fewer GPUs.  The first entry is that of all
    layers, so that a search which its limit ends has a plan.
    """
    table = {}
    whole = (0, layers)
    parts = [part for part in combinations(range(layers + 1), 2) if part != whole]
    for first, end in (whole, *parts):
        for size in stage_sizes(devices):
            is_priced = (size == devices) == ((first, end) == whole)
            seconds = price(first, end, size) if is_priced else None
            if seconds is not None:
                table[first, end, size] = seconds
    return table


def best_hybrid(
    table: Mapping[Key, float],
    layers: int,
    devices: int,
    micro_batches: int,
    transfer_s: Sequence[float],
    kinds: Sequence[str] = KINDS,
) -> HybridPlan:
    """The plan with the least modelled step among those of some kinds.

    ``transfer_s[l]`` are the seconds of a micro-batch's transfers over the cut before layer l, both
    ways.  Raises :class:`Infeasible` if no stages cover all layers and GPUs.
    """
    stages = {
        key: HybridStage(*key, seconds + (transfer_s[key[1]] if key[1] < layers else 0.0))
        for key, seconds in table.items()
        if _may_be(key, layers, kinds)
    }
    best: HybridPlan | None = None
    for limit in sorted({stage.seconds for stage in stages.values()}):
        if best is not None and micro_batches * limit >= best.step_s:
            break  # the slowest stage alone takes as long
        found = _least_sum([s for s in stages.values() if s.seconds <= limit], layers, devices)
        if found is not None:
            plan = HybridPlan(found, micro_batches)
            best = plan if best is None or plan.step_s < best.step_s else best
    if best is None:
        raise Infeasible(
            f"no stages cover {layers} layers and {devices} GPUs in the cost table; use fewer GPUs "
            "or the planner sharding"
        )
    return best


def _may_be(key: Key, layers: int, kinds: Sequence[str]) -> bool:
    first, end, devices = key
    is_whole = (first, end) == (0, layers)
    return (
        "hybrid" in kinds
        or ("sharding" in kinds and is_whole)
        or ("pipeline" in kinds and devices == 1 and not is_whole)
    )


def _least_sum(
    stages: Sequence[HybridStage], layers: int, devices: int
) -> tuple[HybridStage, ...] | None:
    """Stages that cover the first layers with the first devices, with the least sum of seconds."""
    best: dict[tuple[int, int], tuple[float, tuple[HybridStage, ...]]] = {(0, 0): (0.0, ())}
    for stage in sorted(stages, key=lambda s: (s.first, s.end)):
        for used in range(devices - stage.devices + 1):
            before = best.get((stage.first, used))
            if before is None:
                continue
            place, total = (stage.end, used + stage.devices), before[0] + stage.seconds
            if total < best.get(place, (math.inf, ()))[0]:
                best[place] = (total, (*before[1], stage))
    found = best.get((layers, devices))
    return found[1] if found is not None else None
