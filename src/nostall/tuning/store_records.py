"""Store records of tuning: record a result, import a bundle, and verify stored records again."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from nostall import __version__
from nostall.core import BadInput
from nostall.core.measurement import Kind
from nostall.core.text import escape_controls
from nostall.sass.binary import toolchain
from nostall.sass.binary.cubin import Cubin
from nostall.sass.safety import Verdict, verify
from nostall.store import BadBundle, ComparisonRecord, Provenance, Row, Store, Verification, bundle
from nostall.store.artefacts import CUBIN, content_hash
from nostall.store.bundle import BundledRecord
from nostall.tuning.job import Settings, TuningResult, describe
from nostall.tuning.result_records import cubin_notes
from nostall.tuning.source import Source

_RECORDED_SETTINGS = ("strategy", "seed", "seconds", "evaluations", "clock", "cold",
                      "measured_latencies")  # fmt: skip


def record_result(
    store: Store,
    source: Source,
    settings: Settings,
    result: TuningResult,
    device_info: Mapping[str, str],
) -> Row:
    """Record an improved schedule in the store, with its provenance.

    ``device_info`` describes the GPU that measured the result; a modelled result ignores it.
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
    provenance = Provenance(
        original=content_hash(source.cubin),
        optimised=content_hash(result.cubin),
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
        notes=cubin_notes(sm, kind, settings.measured_latencies),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return store.record(source.cubin, result.cubin, provenance)


def import_bundle(store: Store, path: Path) -> list[Row]:
    """Import all records of a bundle, or none of them.

    The hashes of a bundle prove that its files are complete and unchanged.  They do not prove that
    a cubin is safe, so this machine verifies each pair again.  Measurements cannot be repeated
    here; the store delivers a measured record only on the GPU that it names.  Records are read one
    at a time, to verify and again to store them.  Raises :class:`BadBundle` if a record is invalid
    or unsafe.
    """
    records = bundle.read(path)
    verified: dict[tuple[str, str, bool], _Original] = {}
    for record in records:
        pair = (
            record.provenance.original,
            record.provenance.optimised,
            _uses_measured_latencies(record.provenance),
        )
        label = f"bundle {path}, kernel {record.provenance.kernel!r} (record {record.id[:12]})"
        if pair not in verified:
            verified[pair] = _verify_pair(record, label)
        _check_provenance(record.provenance, verified[pair], label)
    contents = ((record.original, record.optimised, record.provenance) for record in records)
    return store.record_all(contents, source="imported")


class _Original(NamedTuple):
    """Facts of a verified original cubin."""

    architecture: str
    """Such as ``sm_90``."""
    kernels: frozenset[str]


def _verify_pair(record: BundledRecord, label: str) -> _Original:
    """Verify the cubins of a record; returns facts of the original."""
    try:
        verdict = _verify(record.original, record.optimised, record.provenance)
        cubin = Cubin.parse(record.original)
    except BadInput as error:
        raise BadBundle(f"{label}: {error}") from error
    if not verdict.safe:
        raise BadBundle(
            f"{label}: the verifier of this version rejects the cubin ({verdict.findings[0]}); "
            "nothing was imported; tune the kernel again"
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


def rejection_reason(store: Store, row: Row) -> str | None:
    """Why this version of the verifier rejects a stored record, or None if it is safe.

    The record was verified when it was stored, perhaps by an older version with weaker rules.
    """
    try:
        provenance = store.provenance(row)
        original = store.artefacts.get(row.original, CUBIN)
        verdict = _verify(original, store.artefacts.get(row.optimised, CUBIN), provenance)
    except BadInput as error:
        return str(error)
    return None if verdict.safe else str(verdict.findings[0])


def _verify(original: bytes, optimised: bytes, provenance: Provenance) -> Verdict:
    """The verdict of this version, with the latency table that the search used."""
    measured = _uses_measured_latencies(provenance)
    return verify(original, optimised, measured_latencies=measured)


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
