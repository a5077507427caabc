"""Into the store: what a tuning run found, and what a bundle brings once it is verified here."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nostall import __version__
from nostall.core import BadInput
from nostall.core.measurement import Kind
from nostall.sass.binary import toolchain
from nostall.sass.binary.cubin import Cubin
from nostall.sass.safety import Verdict, verify
from nostall.store import BadBundle, ComparisonRecord, Provenance, Row, Store, Verification, bundle
from nostall.store.artefacts import content_hash
from nostall.store.store import CUBIN
from nostall.tuning.evidence import notes_on
from nostall.tuning.job import Settings, Tuned, describe
from nostall.tuning.source import Source


def record(
    store: Store, source: Source, settings: Settings, tuned: Tuned, device: Mapping[str, str]
) -> Row:
    """Keep an improved schedule.  ``device`` is the GPU as found; unused where none was asked.

    Raises :class:`BadInput` when nothing was improved: the store holds no originals of their own.
    """
    if not tuned.improved:
        raise BadInput(
            f"{source.kernel}: nothing better than the original was found, so there is nothing to "
            "record; search longer or with another seed"
        )
    kind: Kind = "measured" if tuned.decision is not None else "modelled"
    about = dict(device) if kind == "measured" else {}
    described = describe(source, settings)
    sm = Cubin.parse(source.cubin).sm
    provenance = Provenance(
        original=content_hash(source.cubin),
        optimised=content_hash(tuned.cubin),
        kernel=source.kernel,
        origin=source.origin,
        architecture=f"sm_{sm}",
        kind=kind,
        ratio=tuned.ratio,
        gpu=about.get("gpu"),
        device=about,
        checks=settings.checks if kind == "measured" else None,
        tolerance=settings.tolerance if kind == "measured" else None,
        toolchain={
            "nostall": __version__,
            "python": platform.python_version(),
            "nvdisasm": toolchain.version("nvdisasm"),
            **source.provenance,
        },
        launch=described.pop("launch"),
        verified=_verification(tuned.verdict),
        comparison=_compared(tuned),
        settings={
            k: described[k] for k in ("strategy", "seed", "seconds", "evaluations", "clock", "cold")
        },
        notes=notes_on(sm, kind),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return store.record(source.cubin, tuned.cubin, provenance)


def import_bundle(store: Store, path: Path) -> list[Row]:
    """Take over the records of a bundle; all of them or none.

    Hashes say that the files arrived as they were sent.  That they are safe is not believed but
    found out again: each pair goes through this machine's verifier.  What was measured cannot be
    checked here, and is delivered only on the GPU that the record names.
    """
    packed = bundle.read(path)
    for one in packed:
        what = f"bundle {path}, kernel {one.provenance.kernel!r} (record {one.id[:12]})"
        try:
            verdict = verify(one.original, one.optimised)
            sm = Cubin.parse(one.original).sm
        except BadInput as error:
            raise BadBundle(f"{what}: {error}") from error
        if not verdict.safe:
            raise BadBundle(
                f"{what}: this version's verifier refuses it ({verdict.findings[0]}); nothing was "
                "imported; tune the kernel anew"
            )
        if one.provenance.architecture != f"sm_{sm}" or not one.provenance.verified.safe:
            raise BadBundle(
                f"{what}: its provenance ({one.provenance.architecture}, safe "
                f"{one.provenance.verified.safe}) does not fit the cubin (sm_{sm}); nothing was "
                "imported; get the bundle anew from where it was exported"
            )
    found = [(one.original, one.optimised, one.provenance) for one in packed]
    return store.record_all(found, source="imported")


def refusal(store: Store, row: Row) -> str | None:
    """Why this version would not keep a record, or None.

    A record was judged by the verifier of its day; a later one may know better.
    """
    try:
        store.provenance(row)
        original = store.artefacts.get(row.original, CUBIN)
        verdict = verify(original, store.artefacts.get(row.optimised, CUBIN))
    except BadInput as error:
        return str(error)
    return None if verdict.safe else str(verdict.findings[0])


def _verification(verdict: Verdict) -> Verification:
    return Verification(
        safe=verdict.safe,
        checked=verdict.checked,
        nostall=__version__,
        nvdisasm=toolchain.version("nvdisasm"),
    )


def _compared(tuned: Tuned) -> ComparisonRecord | None:
    if tuned.decision is None or tuned.decision.comparison is None:
        return None
    timing: Any = tuned.decision.outcome.timing
    return ComparisonRecord.from_comparison(tuned.decision.comparison, len(timing.original))
