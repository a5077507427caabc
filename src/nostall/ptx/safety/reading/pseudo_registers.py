"""Pseudo registers: state beside the declared registers, executed as if it were a register.

A load reads the contents of its memory space, a store reads and writes them.  An ordered effect
reads and writes :data:`EFFECTS`, so that its final value is the sequence of all effects.  In this
way one rule, equal values, covers data, memory, effects, convergence and asynchronous operands.
"""

from __future__ import annotations

CARRY = 0
"""The carry flag CC.CF of add.cc, addc, sub.cc, subc, mad.cc and madc."""
GLOBAL, SHARED, LOCAL, PARAMETERS = 1, 2, 3, 4
"""Contents of the writable memory spaces; parameters are those of calls and device functions."""
READ_ONLY = 5
"""Contents of constant memory and of what ld.global.nc reads: changed by other grids only."""
EFFECTS = 6
"""Sequence of the ordered effects: strong accesses, atomics, fences, barriers, cp.async, calls."""
EXCHANGES = 7
"""Sequence of shfl, vote, match, redux, elect, activemask, barriers, and what threads wait for.

Without ``.aligned`` they may pair with instructions elsewhere in the program (CUDA C++ Programming
Guide, independent thread scheduling: shuffles in both branches of an if), so their order counts.
They wait for the threads of their mask; a thread that first waits for a strong store, an atomic or
the arrival at an mbarrier never comes if this instruction stands behind the exchange.
"""
BARRIERS = 8
"""Sequence of the barriers that make a warp converge, which ``.aligned`` instructions do not cross.

bar.sync and barrier.sync.aligned are not among them: PTX requires that the warp has converged at
them (section 9.7.13.1), so it has converged on both sides of them.
"""
ASYNCHRONOUS = 9
"""Sequence of the instructions that begin or end the use of asynchronous operands.

These are fence, commit and wait of wgmma and of tcgen05.
"""
COUNT = 10

WRITABLE = (GLOBAL, SHARED, LOCAL, PARAMETERS)
"""Spaces that a generic address may point to."""
