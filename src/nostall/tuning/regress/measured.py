"""With a GPU: the time that was lost, and the assembler search for it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from nostall.core import BadInput
from nostall.gpu import Device
from nostall.tuning.assembler.job import Setup, open_setup, tune_assembler
from nostall.tuning.gpu_objective import Decision, decide
from nostall.tuning.job import TuningResult
from nostall.tuning.records.result_records import comparison_record
from nostall.tuning.regress.job import Case
from nostall.tuning.settings import Settings
from nostall.tuning.strategies import make_strategy


@dataclass(frozen=True)
class Measured:
    """Times of the older binary and of what the search found, each over the newer binary's."""

    older: Decision
    """Whether the older binary is faster than the newer one."""
    found: TuningResult | None = None
    """The search with the newer ptxas; None if nothing was lost, or without PTX."""

    @property
    def recovered(self) -> float | None:
        """The part of the lost time that the search's result does not take; None if none is lost.

        Above 1 it is faster than the older binary.
        """
        if not self.older.faster or self.older.comparison is None:
            return None
        lost = 1.0 - 1.0 / self.older.comparison.ratio
        if self.found is None or not self.found.improved:
            return 0.0
        return (1.0 - 1.0 / self.found.ratio) / lost

    def to_json(self) -> dict[str, Any]:
        """The measurements as a JSON document."""
        decision = self.found.decision if self.found is not None else None
        return {
            "older": comparison_record(self.older),
            "found": None if decision is None else comparison_record(decision),
            "recovered": self.recovered,
        }


def measure(case: Case, settings: Settings, device: Device, setup: Setup | None = None) -> Measured:
    """Compare the binaries on ``device``; if time was lost, search as ``nostall tune`` does.

    ``device`` was opened for the newer binary.  ``setup``: of the search, from
    :func:`open_search`, if it is open already.  Raises :class:`BadInput` if the older binary
    cannot be measured.
    """
    older = decide(device, case.older.cubin, settings.rounds, settings.checks, settings.seed)
    if older.comparison is None:
        raise BadInput(
            f"{case.older.label} cannot be measured beside {case.newer.label}: "
            f"{older.outcome.status}: {older.outcome.detail}; give --tolerance if the outputs may "
            "differ, or compare without --objective gpu"
        )
    if not older.faster or case.command is None or case.newer.assembler is None:
        return Measured(older)
    with nullcontext(setup) if setup is not None else open_search(case) as opened:
        search = make_strategy(settings.strategy)
        return Measured(older, tune_assembler(opened, search, settings, device))


def open_search(case: Case) -> AbstractContextManager[Setup]:
    """Start the workers of the search of a case whose newer binary a ptxas made."""
    assert case.newer.assembler is not None
    return open_setup(replace(case.source, cubin=case.newer.cubin), [case.newer.assembler])
