"""Losses beside those of originals whose parameters moved by one rounding."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import pytest
from benchmarks.optimizing.losses import judge, kept_changes, line, main

ORIGINAL = [1.0 / (1 + step) for step in range(200)]


def curves(share: float, late: float = 0.0) -> dict[str, list[float]]:
    """A changed program at ``share`` of the band, and ``late`` more in the last step."""
    moved = {f"moved {n}": [x + 1e-6 * n for x in ORIGINAL] for n in range(1, 6)}
    changed = [x + 5e-6 * share for x in ORIGINAL]
    changed[-1] += late
    return {"original": ORIGINAL, "again": ORIGINAL, "changed": changed, **moved}


def test_the_band_decides() -> None:
    within, beyond = judge(curves(1.9)), judge(curves(2.1))
    assert within["is_within"] and not within["is_bit_equal"] and not beyond["is_within"]
    assert line(beyond) == "NOT within twice the band: 2.10 of it"
    assert not judge(curves(0.5, late=1e-3))["is_within"]
    assert line(judge(curves(0.0))) == "bit-equal"


def test_what_has_no_band_is_not_within() -> None:
    still = {**curves(0.5), **{f"moved {n}": ORIGINAL for n in range(1, 6)}}
    assert not judge(still)["is_within"]


def row(name: str, kind: str, value: str, outcome: str = "kept") -> dict[str, object]:
    change = {"name": name, "kind": kind, "value": value}
    return {"optimize": {"attempts": [{"outcome": outcome, "class": "-", "change": change}]}}


def test_native_kernels_and_dropped_changes_are_left_out() -> None:
    assert not kept_changes(row("native kernels", "native", "store"))
    assert not kept_changes(row("torch.compile", "compile", "inductor", "dropped"))


@pytest.mark.slow
def test_losses_of_a_program_with_foreach_are_bit_equal(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    table, out = tmp_path / "table.json", tmp_path / "out.json"
    found = row("foreach optimiser", "optimizer", "foreach")
    table.write_text(json.dumps({"programs": {"dlrm_train": found, "gpt_loop": found}}))
    options = argparse.Namespace(
        out=out, table=table, programs=["gpt_loop"], steps=12, at_once=1, limit=500.0, tiny=True,
        ends=time.perf_counter(),
    )  # fmt: skip
    assert main(options) == 0
    written = json.loads(out.read_text())["programs"]["gpt_loop"]
    assert written["is_bit_equal"] and written["original_repeats"]
    assert min(written["bands"]) > 0 and len(written["curves"]["changed"]) == 12
