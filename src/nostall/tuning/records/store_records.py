"""Store records of tuning: record a result, import a bundle, and verify stored records again."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from nostall import __version__
from nostall.core import BadInput
from nostall.core.measurement import Kind
from nostall.core.text.terminal import escape_controls
from nostall.sass.binary import toolchain
from nostall.sass.binary.cubin import Cubin
from nostall.sass.safety import Verdict, verify
from nostall.sass.safety.dependent_launch import check_wait
from nostall.store import BadBundle, ComparisonRecord, Provenance, Row, Store, Verification, bundle
from nostall.store.artefacts import content_hash
from nostall.store.bundle import BundledRecord
from nostall.store.store import Contents
from nostall.tuning.assembler.recipes.verify_stored import verify_stored
from nostall.tuning.job import TuningResult, describe
from nostall.tuning.records.result_records import result_notes
from nostall.tuning.settings import Settings
from nostall.tuning.sources.source import Source

_CHAIN_NOTE = (
    "the ratio is that of launches back to back: as dependent launches, over the original without"
)
_RECORDED_SETTINGS = ("strategy", "seed", "seconds", "evaluations", "clock", "cold",
                      "measured_latencies")  # fmt: skip


def record_result(
    store: Store,
    source: Source,
    settings: Settings,
    result: TuningResult,
    device_info: Mapping[str, str],
    *,
    dependent_launch: bool = False,
) -> Row:
    """Record an improved cubin in the store, with its provenance and its recipe, if it has one.

    ``device_info`` describes the GPU that measured the result; a modelled result ignores it.
    ``dependent_launch``: see :attr:`.Provenance.dependent_launch`.
    Raises :class:`BadInput` if nothing was improved, because the store holds no bare originals.
    """
    if not result.improved:
        raise BadInput(
            f"{source.kernel}: the search found nothing better than the original, so there is "
            "nothing to record; search longer or with another seed"
        )
    kind: Kind = "measured" if result.decision is not None else "modelled"
    is_measured = kind == "measured"
    device = dict(device_info) if is_measured else {}
    described = describe(source, settings)
    sm = Cubin.parse(source.cubin).sm
    recipe = _recipe_file(source, result)
    notes = result_notes(sm, kind, settings, result)
    provenance = Provenance(
        original=content_hash(source.cubin),
        optimised=content_hash(result.cubin),
        recipe=content_hash(recipe) if recipe is not None else None,
        kernel=source.kernel,
        origin=escape_controls(source.origin),
        architecture=f"sm_{sm}",
        kind=kind,
        ratio=result.ratio,
        gpu=device.get("gpu"),
        device=device,
        checks=settings.checks if is_measured else None,
        tolerance=settings.tolerance if is_measured else None,
        toolchain={
            "nostall": __version__,
            "python": platform.python_version(),
            "nvdisasm": toolchain.version("nvdisasm"),
            **source.provenance,
        },
        launch=described["launch"],
        verified=_verification(result.verdict),
        comparison=_comparison(result),
        settings={key: described[key] for key in _RECORDED_SETTINGS},
        dependent_launch=dependent_launch,
        notes=(*notes, _CHAIN_NOTE) if dependent_launch else notes,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return store.record(source.cubin, result.cubin, provenance, recipe=recipe)


def record_dependent(
    store: Store,
    source: Source,
    settings: Settings,
    result: TuningResult,
    device_info: Mapping[str, str],
) -> Row:
    """Record the result for dependent launches, whose ratio is that of chains of launches."""
    found = result.dependent
    assert found is not None
    as_result = replace(
        result,
        cubin=found.cubin,
        improved=found.improved,
        verdict=found.verdict,
        decision=found.decision,
        recipe=found.recipe,
    )
    return record_result(store, source, settings, as_result, device_info, dependent_launch=True)


def _recipe_file(source: Source, result: TuningResult) -> bytes | None:
    """The recipe of a cubin that was assembled anew, with its PTX; None for moved instructions."""
    if result.recipe is None:
        return None
    assert source.ptx is not None
    return result.recipe.with_ptx(source.ptx)


def import_bundle(store: Store, path: Path, *, measured_latencies: bool = False) -> list[Row]:
    """Import all records of a bundle, or none of them.

    The hashes of a bundle prove that its files are complete and unchanged.  They do not prove that
    a cubin is safe, so this machine verifies each pair again; a cubin that was assembled anew is
    also made again from its recipe.  Measurements cannot be repeated
    here; the store delivers a measured record only on the GPU that it names.  Records are read one
    at a time, to verify and again to store them.

    The rules are those of this machine: ``measured_latencies`` is the importer's decision, whatever
    the bundle says of its search.  Raises :class:`BadBundle` if a record is invalid or unsafe.
    """
    records = bundle.read(path)
    verified: dict[tuple[str, str, str | None, bool, str], _Original] = {}
    for record in records:
        pair = (
            record.provenance.original,
            record.provenance.optimised,
            record.provenance.recipe,
            record.provenance.dependent_launch,
            record.provenance.kernel,
        )
        label = f"bundle {path}, kernel {record.provenance.kernel!r} (record {record.id[:12]})"
        if pair not in verified:
            verified[pair] = _verify_pair(record, label, measured_latencies)
        _check_provenance(record.provenance, verified[pair], label)
    return store.record_all((record.contents for record in records), source="imported")


class _Original(NamedTuple):
    """Facts of a verified original cubin."""

    architecture: str
    """Such as ``sm_90``."""
    kernels: frozenset[str]


def _verify_pair(record: BundledRecord, label: str, measured_latencies: bool) -> _Original:
    """Verify the cubins of a record; returns facts of the original."""
    try:
        objection, unproved = _verify(record.contents, measured_latencies)
        cubin = Cubin.parse(record.original)
    except BadInput as error:
        raise BadBundle(f"{label}: {error}") from error
    if objection:
        remedy = "tune the kernel again"
        if _uses_measured_latencies(record.provenance) and not measured_latencies:
            remedy += (
                "; its search permitted issue distances measured on a GPU: to permit them here, "
                "too, import with --measured-latencies"
            )
        raise BadBundle(
            f"{label}: the verifier of this version rejects the cubin ({objection}); "
            f"nothing was imported; {remedy}"
        )
    if unproved:
        raise BadBundle(
            f"{label}: the cubin was assembled anew, and it cannot be made again here: {unproved}; "
            "nothing was imported; install that ptxas (`nostall doctor` lists those found), or "
            "export without this record"
        )
    kernels = frozenset(text.name for text in cubin.texts if text.is_kernel)
    return _Original(f"sm_{cubin.sm}", kernels)


def _check_provenance(provenance: Provenance, original: _Original, label: str) -> None:
    claims = (provenance.architecture, provenance.kernel in original.kernels)
    if claims != (original.architecture, True) or not provenance.verified.safe:
        raise BadBundle(
            f"{label}: its provenance ({provenance.architecture}, safe {provenance.verified.safe}) "
            f"does not match the cubin ({original.architecture}, kernels: "
            f"{', '.join(sorted(original.kernels)[:5])}); nothing was imported; get a new copy of "
            "the bundle from the machine that exported it"
        )


def rejection_reason(store: Store, row: Row, *, measured_latencies: bool = False) -> str | None:
    """Why this version of the verifier rejects a stored record, or None if it is safe.

    The record was verified when it was stored, perhaps by an older version with weaker rules.
    ``measured_latencies`` permits issue distances measured on a GPU; a record of this machine's own
    search that permitted them has this permission.
    """
    try:
        record = store.contents(row)
        objection, _ = _verify(record, measured_latencies or row.source == "tuned")
    except BadInput as error:
        return str(error)
    return objection or None


def _verify(record: Contents, measured_latencies: bool) -> tuple[str, str]:
    """(why this version rejects a cubin, what this machine cannot check), empty if it is safe.

    ``measured_latencies``: whether moved instructions may be as close as the search permitted.
    """
    if record.provenance.dependent_launch:
        problem = check_wait(record.optimised, record.provenance.kernel)
        if problem:
            return problem, ""
    if record.recipe is not None:
        answer = verify_stored(record.recipe, record.original, record.optimised)
        return answer.objection, answer.unproved
    measured = measured_latencies and _uses_measured_latencies(record.provenance)
    verdict = verify(record.original, record.optimised, measured_latencies=measured)
    return "" if verdict.safe else str(verdict.findings[0]), ""


def _uses_measured_latencies(provenance: Provenance) -> bool:
    return provenance.settings.get("measured_latencies") is True


def _verification(verdict: Verdict) -> Verification:
    return Verification(
        safe=verdict.safe,
        checked=verdict.checked,
        nostall=__version__,
        nvdisasm=toolchain.version("nvdisasm"),
    )


def _comparison(result: TuningResult) -> ComparisonRecord | None:
    if result.decision is None or result.decision.comparison is None:
        return None
    timing: Any = result.decision.outcome.timing
    return ComparisonRecord.from_comparison(result.decision.comparison, len(timing.original))
