"""Last phase of the assembler search: move native instructions of the winner."""

from __future__ import annotations

from dataclasses import dataclass

from nostall.core import Budget, Search
from nostall.core.errors import ContractBroken
from nostall.gpu import Device
from nostall.sass import Program, verify
from nostall.sass.schedule import ScheduleSpace
from nostall.tuning.gpu_objective import GpuObjective, race_states
from nostall.tuning.nominal_work import SIP, nominal_flops, strategy_name


@dataclass(frozen=True)
class ImprovedOrder:
    """A cubin with native instructions in another order."""

    cubin: bytes
    schedule: str
    """The order, as its space writes it."""


def improve_order(
    cubin: bytes,
    kernel: str,
    device: Device,
    search: Search,
    seconds: float,
    seed: int,
    flops: float | None = None,
) -> ImprovedOrder | None:
    """Move the native instructions of ``cubin`` for ``seconds``; None if nothing is better.

    ``search`` is the strategy that chooses the moves.

    The device compares with the original that it was opened for.  ``cubin`` itself takes part in
    the race of the finalists.  Raises :class:`ContractBroken` if the verifier rejects the result.
    """
    program = Program.from_cubin(cubin)
    space = ScheduleSpace(program, program.kernel(kernel))
    objective = GpuObjective(space, device, flops)
    start = space.start()
    if objective.flops is None and strategy_name(search) == SIP:
        objective.flops = nominal_flops(objective, start)
    search.run(space, objective, Budget(seconds), seed=seed)
    states = [state for state in objective.finalists() if state.key() != start.key()]
    ranked = race_states(objective, [start, *states])
    if not ranked or ranked[0].key() == start.key():
        return None
    candidate = space.impose(ranked[0]).to_cubin()
    verdict = verify(cubin, candidate)
    if not verdict.safe:
        raise ContractBroken(
            f"the verifier rejects moves of native instructions: {verdict.findings[0]}; please "
            "report this bug"
        )
    return ImprovedOrder(candidate, space.dump(ranked[0]))
