"""Tests of the page of fused chains: it matches the committed results, and its parts."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.fusion.chains.page import PAGE, chains_page, load_chains, mean, share, slower, text

CHAIN = "SwiGLU 16384x5504"
FIRST_METHODS = ("eager", "compile", "max-autotune")


def chain_result(
    ratio: float, verdict: str = "faster", name: str = CHAIN, us: float = 2.0, size: float = 100.0
) -> dict[str, Any]:
    """A result of the benchmark's first version, without *best Inductor* and Liger."""
    comparison = {"ratio": ratio, "low": ratio - 0.01, "high": ratio + 0.01, "verdict": verdict}
    return {
        "chain": name,
        "gpu": "G",
        "torch": "2",
        "date": "2026-01-01T00:00",
        "bytes_least": 4.3e6 * size,
        "samples_us": {"stitched": [0.5 * size, us * size, 9.0 * size]},
        "compared": dict.fromkeys(FIRST_METHODS, comparison),
        "stitched": {"plans": ["thread 1"]},
    }


def complete_result(ratio: float) -> dict[str, Any]:
    """A result with all methods."""
    result = chain_result(ratio, us=1.1)
    comparisons = dict.fromkeys(("best Inductor", "liger"), result["compared"]["eager"])
    return {
        **result,
        "compared": {**result["compared"], **comparisons},
        "inductor": {"taken": "multi-kernel"},
        "failures": {"compile": "it broke", "liger": "Liger has no kernel that computes x"},
    }


def join_lines(text: str) -> str:
    return " ".join(text.split())


def test_the_committed_page_is_up_to_date() -> None:
    assert load_chains()
    assert PAGE.read_text() == text(), "run `python -m benchmarks page fusion-chains`"


def test_means_and_bandwidth_shares() -> None:
    assert mean([chain_result(1.0), chain_result(4.0)], "compile") == pytest.approx(2.0)
    assert mean([chain_result(1.0), complete_result(4.0)], "liger") == pytest.approx(4.0)
    assert mean([chain_result(1.0)], "liger") is None
    assert share(chain_result(1.0)) == pytest.approx(0.5)


def test_slower_lists_all_methods_but_eager() -> None:
    assert slower([chain_result(1.2)]) == []
    assert slower([chain_result(0.9, "slower")]) == [
        f"{CHAIN} (0.900 of compile)",
        f"{CHAIN} (0.900 of max-autotune)",
    ]
    assert (
        slower([chain_result(0.999, "same")])[0] == f"{CHAIN} (0.999 of compile, within the noise)"
    )


def test_the_table_of_targets_says_which_are_met() -> None:
    page = chains_page([chain_result(1.2)] * 16, 3)
    assert "| at least 16 chains measured | 16, 3 not measured | yes |" in page
    assert "| geometric mean over compile at least 1.25 | 1.20 | **no** |" in page
    assert "| geometric mean over max-autotune at least 1.10 | 1.20 | yes |" in page
    judged = "single-pass chains of at least 100 MB at 85 % of the copy bandwidth"
    assert f"| {judged} | 0 of 16 | **no** |" in page
    assert "| no chain slower than another method | none | yes |" in page
    assert "liger |" in page and "geometric mean over liger" not in page
    page = chains_page([complete_result(1.2), chain_result(1.2, name="norm backward 8192x4096")], 3)
    assert f"{judged} | 1 of 1 | yes |" in page
    page = chains_page([complete_result(1.2), chain_result(1.2, size=20.0)], 3)
    assert f"| {judged} | 1 of 1 | yes |" in page
    assert "of any size at 85 % of the copy bandwidth | 1 of 2 | no target |" in page
    assert "| geometric mean over liger | 1.20 | no target |" in page


def test_rows_have_ratios_to_all_methods_and_the_bandwidth_share() -> None:
    page = chains_page(
        [
            complete_result(1.2),
            chain_result(1.2),
            chain_result(1.2, name="norm backward 8192x4096"),
        ],
        0,
    )
    rows = [line for line in page.splitlines() if line.startswith((f"| {CHAIN}", "| norm back"))]
    interval = "1.200 [1.190, 1.210]"
    assert rows[0].endswith(f"| {interval}: multi-kernel | {interval} | 91 % | – | thread 1 |")
    assert rows[1].endswith("| – | – | 50 % < | – | thread 1 |")
    assert rows[2].endswith("| – | – | 50 % * | – | thread 1 |")
    assert f"- {CHAIN}, compile: it broke" in page and "Liger has no kernel" not in page


def test_chains_are_compared_with_copies_of_the_same_bytes() -> None:
    copies = {CHAIN: {"bytes": 4.3e8, "samples_us": [150.0, 180.0, 200.0]}}
    page = chains_page([chain_result(1.2)], 0, copies=copies)
    assert "| 50 % < | 90 % | thread 1 |" in page
    assert "| single-pass chains at 85 % of a copy of as many bytes | 1 of 1 | no target |" in page
    other_size = {CHAIN: {**copies[CHAIN], "bytes": 1e6}}
    assert "| 50 % < | – | thread 1 |" in chains_page([chain_result(1.2)], 0, copies=other_size)


def test_the_page_has_dram_bytes_or_says_that_they_are_missing() -> None:
    assert "were not counted" in join_lines(
        chains_page([chain_result(1.2)], 0, {CHAIN: {"failure": "x"}})
    )
    one_kernel = {"kernels": 1, "read_bytes": 2e8, "written_bytes": 2.3e8}
    two_kernels = {"kernels": 2, "read_bytes": 6e8, "written_bytes": 2.6e8}
    traffic = {CHAIN: {"stitched": one_kernel, "compile": two_kernels, "max-autotune": two_kernels}}
    page = chains_page([chain_result(1.2)], 0, traffic)
    assert f"| {CHAIN} | 430.0 | 430.0 (1.00 x), 1 kernel | 860.0 (2.00 x), 2 kernels |" in page
