"""Records for tests of the store; their cubins are arbitrary bytes that the store never parses."""

from __future__ import annotations

from typing import Any

from nostall.store import ComparisonRecord, Provenance, Row, Store, Verification
from nostall.store.artefacts import content_hash

GPU = "NVIDIA H200"
ORIGINAL = b"original"


def provenance(original: bytes, optimised: bytes, **changes: Any) -> Provenance:
    low = changes.pop("low", 1.01)
    comparison = ComparisonRecord(
        ratio=low + 0.01,
        low=low,
        high=low + 0.02,
        null_low=0.999,
        null_high=1.001,
        triples=200,
        verdict="faster",
    )
    fields: dict[str, Any] = {
        "original": content_hash(original),
        "optimised": content_hash(optimised),
        "kernel": "k",
        "origin": "k.cubin",
        "architecture": "sm_90",
        "kind": "measured",
        "ratio": low + 0.01,
        "gpu": GPU,
        "device": {"gpu": GPU, "driver_version": "580"},
        "toolchain": {},
        "launch": None,
        "verified": Verification(safe=True, checked=9, nostall="0.1.0", nvdisasm="V13.5.37"),
        "comparison": comparison,
        "settings": {},
        "notes": (),
        "created": "2026-11-21T00:00:00+00:00",
    }
    return Provenance(**{**fields, **changes})


def modelled(original: bytes, optimised: bytes) -> Provenance:
    return provenance(
        original, optimised, kind="modelled", gpu=None, device={}, comparison=None, ratio=1.5
    )


def keep(store: Store, optimised: bytes, original: bytes = ORIGINAL, **changes: Any) -> Row:
    return store.record(original, optimised, provenance(original, optimised, **changes))
