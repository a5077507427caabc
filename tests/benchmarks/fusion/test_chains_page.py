"""The page of the fused chains matches the committed files, and says what they say."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.fusion.chains.page import PAGE, chains_page, load_chains, mean, share, slower, text

NAME = "SwiGLU 16384x5504"
OLD = ("eager", "compile", "max-autotune")


def chain(
    ratio: float, verdict: str = "faster", name: str = NAME, us: float = 2.0, size: float = 100.0
) -> dict[str, Any]:
    """A result as the first version of the benchmark left them."""
    said = {"ratio": ratio, "low": ratio - 0.01, "high": ratio + 0.01, "verdict": verdict}
    return {
        "chain": name,
        "gpu": "G",
        "torch": "2",
        "date": "2026-01-01T00:00",
        "bytes_least": 4.3e6 * size,
        "samples_us": {"stitched": [0.5 * size, us * size, 9.0 * size]},
        "compared": dict.fromkeys(OLD, said),
        "stitched": {"plans": ["thread 1"]},
    }


def newer(ratio: float) -> dict[str, Any]:
    """A result with all methods."""
    found = chain(ratio, us=1.1)
    both = dict.fromkeys(("best Inductor", "liger"), found["compared"]["eager"])
    return {
        **found,
        "compared": {**found["compared"], **both},
        "inductor": {"taken": "multi-kernel"},
        "failures": {"compile": "it broke", "liger": "Liger has no kernel that computes x"},
    }


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_the_page_is_that_of_the_committed_files() -> None:
    assert load_chains()
    assert PAGE.read_text() == text(), "run `python -m benchmarks page fusion-chains`"


def test_means_and_shares() -> None:
    assert mean([chain(1.0), chain(4.0)], "compile") == pytest.approx(2.0)
    assert mean([chain(1.0), newer(4.0)], "liger") == pytest.approx(4.0)
    assert mean([chain(1.0)], "liger") is None
    assert share(chain(1.0)) == pytest.approx(0.5)


def test_what_is_slower_is_named_eager_aside() -> None:
    assert slower([chain(1.2)]) == []
    assert slower([chain(0.9, "slower")]) == [
        f"{NAME} (0.900 of compile)",
        f"{NAME} (0.900 of max-autotune)",
    ]
    assert slower([chain(0.999, "same")])[0] == f"{NAME} (0.999 of compile, within the noise)"


def test_targets_are_met_or_not() -> None:
    page = chains_page([chain(1.2)] * 16, 3)
    assert "| at least 16 chains measured | 16, 3 not measured | yes |" in page
    assert "| geometric mean over compile at least 1.25 | 1.20 | **no** |" in page
    assert "| geometric mean over max-autotune at least 1.10 | 1.20 | yes |" in page
    judged = "single-pass chains of at least 100 MB at 85 % of the copy bandwidth"
    assert f"| {judged} | 0 of 16 | **no** |" in page
    assert "| no chain slower than another method | none | yes |" in page
    assert "liger |" in page and "geometric mean over liger" not in page
    page = chains_page([newer(1.2), chain(1.2, name="norm backward 8192x4096")], 3)
    assert f"{judged} | 1 of 1 | yes |" in page
    page = chains_page([newer(1.2), chain(1.2, size=20.0)], 3)
    assert f"| {judged} | 1 of 1 | yes |" in page
    assert "of any size at 85 % of the copy bandwidth | 1 of 2 | no target |" in page
    assert "| geometric mean over liger | 1.20 | no target |" in page


def test_rows_have_all_methods_and_say_how_far_it_is() -> None:
    page = chains_page([newer(1.2), chain(1.2), chain(1.2, name="norm backward 8192x4096")], 0)
    rows = [line for line in page.splitlines() if line.startswith((f"| {NAME}", "| norm back"))]
    interval = "1.200 [1.190, 1.210]"
    assert rows[0].endswith(f"| {interval}: multi-kernel | {interval} | 91 % | – | thread 1 |")
    assert rows[1].endswith("| – | – | 50 % < | – | thread 1 |")
    assert rows[2].endswith("| – | – | 50 % * | – | thread 1 |")
    assert f"- {NAME}, compile: it broke" in page and "Liger has no kernel" not in page


def test_short_chains_stand_beside_a_copy_of_as_many_bytes() -> None:
    copies = {NAME: {"bytes": 4.3e8, "samples_us": [150.0, 180.0, 200.0]}}
    page = chains_page([chain(1.2)], 0, copies=copies)
    assert "| 50 % < | 90 % | thread 1 |" in page
    assert "| single-pass chains at 85 % of a copy of as many bytes | 1 of 1 | no target |" in page
    other = {NAME: {**copies[NAME], "bytes": 1e6}}
    assert "| 50 % < | – | thread 1 |" in chains_page([chain(1.2)], 0, copies=other)


def test_bytes_are_counted_or_said_not_to_be() -> None:
    assert "were not counted" in one_line(chains_page([chain(1.2)], 0, {NAME: {"failure": "x"}}))
    one = {"kernels": 1, "read_bytes": 2e8, "written_bytes": 2.3e8}
    two = {"kernels": 2, "read_bytes": 6e8, "written_bytes": 2.6e8}
    counted = {NAME: {"stitched": one, "compile": two, "max-autotune": two}}
    page = chains_page([chain(1.2)], 0, counted)
    assert f"| {NAME} | 430.0 | 430.0 (1.00 x), 1 kernel | 860.0 (2.00 x), 2 kernels |" in page
