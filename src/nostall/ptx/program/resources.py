"""Resources that order instructions: memory, synchronization and hidden state beside registers.

Two instructions keep their order if one of them writes a resource, or a register, that the other
one reads or writes. A fence is an instruction that writes the resources of all that it orders.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Resource(Enum):
    """What instructions read and write beside registers."""

    GLOBAL = "global memory"
    SHARED = "shared memory"
    LOCAL = "local memory"
    PARAM = "parameters of calls and results"
    STABLE = "memory that no thread writes while the kernel runs"
    FENCE = "order of fences, atomics and asynchronous operations"
    CONVERGENCE = "convergence of the warp"
    """Read by instructions that all threads of a warp execute together."""
    WARP = "order of exchanges between the threads of a warp"
    """Two threads in different branches can meet at different instructions: their order counts."""
    CARRY = "carry flag CC.CF"
    WGMMA = "registers that wgmma.mma_async may be using"
    """Written by the fence, commit and wait of wgmma; read by all instructions that name a register
    of a wgmma.mma_async, which these three name in no operand."""
    TCGEN05 = "registers that tcgen05 may be using"


Reference = str | Resource
"""A register, by a name that is unique in its function, or another resource."""

MEMORY = frozenset((Resource.GLOBAL, Resource.SHARED, Resource.LOCAL, Resource.PARAM))
"""All memory that a generic address may mean and that threads may write."""


@dataclass(frozen=True, slots=True)
class Effect:
    """Resources that an instruction reads and writes."""

    reads: frozenset[Resource] = frozenset()
    writes: frozenset[Resource] = frozenset()

    def __or__(self, other: Effect) -> Effect:
        return Effect(self.reads | other.reads, self.writes | other.writes)


def writing(*resources: Resource, also: Iterable[Resource] = ()) -> Effect:
    """The effect that writes ``resources`` and ``also``."""
    return Effect(writes=frozenset(resources) | frozenset(also))


def reading(*resources: Resource) -> Effect:
    """The effect that reads ``resources``."""
    return Effect(reads=frozenset(resources))


PURE = Effect()
FENCE = writing(Resource.FENCE, also=MEMORY)
"""Keeps its order with all fences and with all accesses of memory that threads write."""
DEVICE_FENCE = FENCE | writing(Resource.STABLE, Resource.WARP)
"""A fence that other threads may wait for.

It also orders loads of constant memory, as other kernels or blocks may depend on it, and exchanges:
a thread of the warp that waits for it comes to an exchange of all threads only then.
"""
BARRIER = FENCE | writing(Resource.CONVERGENCE, Resource.WARP)
"""A fence that also orders the instructions that a warp executes together."""
ALIGNED = reading(Resource.CONVERGENCE)
"""Executed by all threads of a warp together."""
ALIGNED_BARRIER = FENCE | ALIGNED | writing(Resource.WARP)
"""A barrier that needs a converged warp and makes none: aligned instructions may cross it."""
EXCHANGE = reading(Resource.CONVERGENCE) | writing(Resource.WARP)
"""Exchanges values between the threads of a warp that its mask names."""
EVERYTHING = Effect(writes=frozenset(Resource))
"""Keeps its order with everything but computation in other registers."""
