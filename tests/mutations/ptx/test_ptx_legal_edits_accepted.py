"""The PTX validator accepts every edit that computes the same by construction."""

from __future__ import annotations

import os
import random
import zlib

import pytest

from tests.mutations.ptx.legal_edits import LEGAL_EDITS
from tests.mutations.ptx.mutants import all_texts, validator

COUNT = int(os.environ.get("NOSTALL_MUTANTS", "1"))
"""Edits of each kind and text."""


@pytest.mark.parametrize("kind", LEGAL_EDITS)
def test_every_legal_edit_is_accepted(kind: str) -> None:
    made = 0
    for text in all_texts():
        rng = random.Random(zlib.crc32(f"{kind} {text.name}".encode()))
        for _ in range(COUNT):
            candidate = LEGAL_EDITS[kind](text, rng)
            if candidate is not None:
                checks = validator(str(text))
                assert not checks.unknown_opcodes
                verdict = checks.check(candidate)
                assert verdict.accepted, f"{text.name}: {verdict.findings[0]}"
                assert verdict.checked > 0
                made += 1
    assert made >= 25 * COUNT


def test_allowed_differences_are_named() -> None:
    text = next(text for text in all_texts() if text.name == "atomics.sm_80")
    rng = random.Random(0)
    expected = {
        "kernels renamed": "is named",
        "cache hints": "cache hints",
        "register budget": ".maxnreg",
    }
    for kind, part in expected.items():
        candidate = LEGAL_EDITS[kind](text, rng)
        assert candidate is not None
        assert part in " ".join(validator(str(text)).check(candidate).differences)
    assert not validator(str(text)).check(str(text)).differences
