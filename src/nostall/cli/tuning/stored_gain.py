"""Record the gain of ``nostall tune`` in the store."""

from __future__ import annotations

from collections.abc import Mapping

from nostall.cli.terminal.console import err
from nostall.store import BadStore, Row, Store
from nostall.tuning.job import TuningResult
from nostall.tuning.records.store_records import record_dependent, record_result
from nostall.tuning.settings import Settings
from nostall.tuning.sources.source import ASSEMBLER_KEY, Source


def store_gain(
    source: Source,
    settings: Settings,
    result: TuningResult,
    device_info: Mapping[str, str] | None,
    requested: bool | None,
) -> Row | None:
    """Record a gain in the store; returns its row, or None if nothing was recorded.

    ``requested`` is the option ``--store``.  By default a gain is recorded if it was measured
    (``device_info`` is not None); an unusable store is then only a warning.  A gain of dependent
    launches is a record of its own.
    """
    if result.improved and ASSEMBLER_KEY in source.provenance:
        err.print(
            "not recorded in the store: programs load the compiler's own cubin, but this result "
            "starts from the cubin of another ptxas; use nostall.load(best.cubin)"
        )
        return None
    is_wanted = requested or (requested is None and device_info is not None)
    has_chain_gain = result.dependent is not None and result.dependent.improved
    if not (result.improved or has_chain_gain) or not is_wanted:
        return None
    row: Row | None = None
    try:
        store = Store()
        if result.improved:
            row = record_result(store, source, settings, result, device_info or {})
        if has_chain_gain:
            dependent = record_dependent(store, source, settings, result, device_info or {})
            row = row or dependent
    except BadStore as error:
        if requested:
            raise
        err.print(f"not recorded in the store: {error}")
    return row
