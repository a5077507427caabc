"""The portfolio of a step's kernels, assembled and verified without a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nostall.ptx.assemble.versions import Assembler
from nostall.tuning.assembler.candidate import build_state, find_hazards
from nostall.tuning.assembler.job import open_setup
from nostall.tuning.sources.source import Source


@dataclass(frozen=True)
class PortfolioCheck:
    """How many candidates of one kernel are built and accepted by the verifier."""

    source: Source
    registers: int
    """Registers of a thread of the original."""
    reproduces: bool
    """Whether an installed ptxas makes the original's code from its PTX."""
    statuses: Counter[str]
    """Candidates by the status of their build: ``built``, ``unproved`` and others."""
    codes: int
    """Different machine codes."""
    unsafe: tuple[str, ...]
    """Why the verifier of machine code refuses candidates, one text each."""


def check_portfolio(
    source: Source,
    installed: Sequence[Assembler] | None = None,
    workers: int | None = None,
    most: int | None = None,
) -> PortfolioCheck:
    """Assemble the portfolio of a kernel, or its first ``most`` states, and verify each cubin.

    Other arguments and errors are those of :func:`nostall.tuning.assembler.job.open_setup`.
    """
    with open_setup(source, installed, workers) as setup:
        states = setup.space.portfolio()[:most]
        tasks = [setup.pool.submit_task(build_state, state) for state in states]
        built = [task.result() for task in tasks]
        first = {candidate.code_sha256: candidate for candidate in built if candidate.cubin}
        checks = [setup.pool.submit_task(find_hazards, c.cubin) for c in first.values()]
        hazards = [check.result() for check in checks]
    return PortfolioCheck(
        source,
        setup.compiler.registers,
        setup.compiler.reproduces,
        Counter(candidate.status for candidate in built),
        len(first),
        tuple(hazard for hazard in hazards if hazard),
    )
