"""Sections of the assembler's page whose results are measured later."""

from __future__ import annotations

from typing import Any

from benchmarks.ptx.page_sections import chains_section, order_gain, unseen_section


def figure(ratio: float, verdict: str = "faster") -> dict[str, Any]:
    interval = {"low": ratio - 0.01, "high": ratio + 0.01, "null_low": 0.999, "null_high": 1.001}
    return {"ratio": ratio, "verdict": verdict, **interval}


def unseen(kernel: str, over_a: dict[str, Any] | None, deployed: float) -> dict[str, Any]:
    return {
        "kernel": kernel, "original_us": 12.0, "over_a": over_a, "over_b": over_a,
        "deployed": deployed, "search": {}, "seconds_searched": 20.0, "gpu": {"gpu": "H100"},
    }  # fmt: skip


def test_kernels_without_a_winner_count_as_one() -> None:
    rows = [unseen("topk", figure(1.21), 1.21), unseen("rotary", None, 1.0)]
    text = unseen_section(rows, "[JSON](x)")
    assert "Geometric mean over (a): 1.100, over (b): 1.100" in " ".join(text.split())
    assert "| rotary | 12.00 | 1.000 | – | – | 1.000 |" in text
    assert order_gain(unseen("a", figure(1.1, "same"), 1.0)) == 1.0


def test_figures_of_chains_that_are_no_gain_are_in_brackets() -> None:
    figures = {name: figure(1.21) for name in ("order", "wait", "best")}
    figures["triton"] = figure(0.98, "slower")
    common = {"chain_us": 5.0, "gpu": {"gpu": "H100"}}
    rows = [
        {"kernel": "k", "figures": figures, "missing_wait": "wrong", **common},
        {"kernel": "nvcc", "figures": {"wait": figure(1.1)}, "missing_wait": "timed", **common},
    ]
    text = chains_section(rows, "[JSON](x)")
    assert "1 of 2 kernels" in " ".join(text.split())
    assert "[0.980 (0.970 to 0.990)]" in text
    assert (
        "| geometric mean of 1 with all figures, kept |  | 1.210 | 1.210 | 1.210 | 1.000 |" in text
    )
