"""docs/fusion_measured.md says what the committed chains say."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.fusion_chain_programs import CHAINS
from benchmarks.fusion_chains_page import PAGE, load, means, page, share


def chain(ratio: float, verdict: str = "faster") -> dict[str, Any]:
    said = {"ratio": ratio, "low": ratio - 0.01, "high": ratio + 0.01, "verdict": verdict}
    return {
        "chain": "c",
        "gpu": "G",
        "torch": "2",
        "date": "2026-01-01T00:00",
        "bytes_least": 4.3e6,
        "samples_us": {"stitched": [1.0, 2.0, 9.0]},
        "compared": dict.fromkeys(("eager", "compile", "max-autotune"), said),
        "stitched": {"plans": ["thread 1"]},
    }


def test_the_page_is_that_of_the_committed_files() -> None:
    chains = load()
    assert chains and PAGE.read_text() == page(chains, len(CHAINS) - len(chains))


def test_means_and_shares() -> None:
    assert means([chain(1.0), chain(4.0)])["compile"] == pytest.approx(2.0)
    assert share(chain(1.0)) == pytest.approx(0.5)


def test_what_is_slower_is_named() -> None:
    assert "Slower than another method: none." in page([chain(1.2)], 0)
    assert "c (0.900 of eager), c (0.900 of" in page([chain(0.9, "slower")], 0).replace("\n", " ")
