"""What is said of a plan, for the terminal and the page: a row a stage, and sentences."""

from __future__ import annotations

from collections.abc import Iterable

from nostall.parallel.outcome import Outcome
from nostall.report.units import Scale

_GIB = 2**30


def stage_table(found: Outcome) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Column names, and a row of cells for each stage; times in one unit, named once."""
    costs = found.timeline.costs
    time = Scale("s", max(*costs.forward, *costs.backward, 1e-9))
    names = ("forward", "backward", "onward", "all-reduce")
    memory = "memory" if found.memory.measured else "memory at least"
    columns = (
        "stage",
        "layers",
        "GPUs",
        *(f"{name}, {time.unit}" for name in names),
        "held",
        f"{memory}, GiB",
    )
    rows = []
    for s, stage in enumerate(found.plan.stages):
        worker = costs.worker[s]
        onward = costs.onward[s].seconds if s < len(costs.onward) else 0.0
        spent = (
            costs.forward[s],
            costs.backward[s] + costs.weight[s],
            onward,
            costs.allreduce[s].seconds,
        )
        peak, capacity = found.memory.peak[worker] / _GIB, found.memory.capacity[worker] / _GIB
        rows.append(
            (
                str(s),
                ranges(range(stage.first, stage.end)),
                ranges(stage.gpus),
                *(time.number(seconds) for seconds in spent),
                str(found.timeline.held[s]),
                f"{peak:.3g} of {capacity:.3g}",
            )
        )
    return columns, rows


def sentences(found: Outcome) -> list[str]:
    """The plan in a line, its predicted time with its parts, and the notes."""
    work, time = found.work, Scale("s", found.timeline.iteration_s)
    again = ", re-computation" if found.plan.recompute else ""
    said = [
        f"{found.planner}: {found.plan.split}, order {found.plan.policy}{again}, "
        f"{work.micro_batches} micro-batches of {work.global_batch / work.micro_batches:.4g}",
        f"modelled iteration {time(found.timeline.iteration_s)}, modelled speed-up "
        f"{found.speedup:.4g}x over one GPU ({found.busy_share:.0%} of the cluster busy)",
    ]
    parts = found.parts()
    if "closed_form_steady_s" in parts:
        named = [
            f"{k} {time(parts[f'closed_form_{k}_s'])}" for k in ("warm_up", "steady", "ending")
        ]
        said.append(f"closed form (DAPPLE's L): {', '.join(named)}".replace("_", "-"))
    floor = max(parts["busiest_resource_s"], parts["critical_path_s"])
    said.append(
        f"no order beats {time(floor)}; "
        f"after the last backward pass {time(parts['after_last_backward_s'])}"
    )
    return said + [f"note: {note}" for note in found.notes()]


def ranges(numbers: Iterable[int]) -> str:
    """0-7, 9 for the numbers 0 to 7 and 9."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
