"""Check of the issue distances that moves of native instructions rely on, before the first one.

Tables for an architecture whose distances were never measured rest on compiler output alone.  On
such a GPU the kernel itself runs at the smallest distances that its moves may leave, on random
inputs.  Other outputs than the original's mean that the table does not hold there.
"""

from __future__ import annotations

from nostall.core.errors import UnsupportedArchitecture
from nostall.gpu import Device
from nostall.sass.binary.cubin import Cubin
from nostall.sass.safety import measured_distances
from nostall.sass.schedule import ScheduleSpace
from nostall.sass.schedule.mobility import tight_schedule

WALKS = (0, 0, 50, 50, 200, 200, 800, 800)
"""Random moves before the stalls are lowered, for each schedule that runs."""


def are_measured(cubin: bytes) -> bool:
    """Whether distances were measured for the architecture, which bound the moves there."""
    return measured_distances.find(Cubin.parse(cubin).sm) is not None


def check_distances(space: ScheduleSpace, device: Device) -> int:
    """Run the kernel at the smallest legal distances; returns the number of schedules that ran.

    Raises :class:`UnsupportedArchitecture` if a schedule gives other outputs, faults or hangs.
    """
    states = {tight_schedule(space, moves, seed) for seed, moves in enumerate(WALKS)}
    for state in states:
        outcome = device.evaluate(space.impose(state).to_cubin())
        if outcome.status in ("wrong", "fault", "hang"):
            raise UnsupportedArchitecture(
                f"{space.function.name} at issue distances that the table for "
                f"sm_{space.program.sm} permits: {outcome.status} on "
                f"{device.info.get('gpu', 'this GPU')} ({outcome.detail}); its native instructions "
                "are not moved; --strategy assembler, whose code ptxas makes, does without; report "
                "this GPU and kernel"
            )
    return len(states)
