"""The section on whole models: means, shares of kernels, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.fusion.unseen import whole_models


def record(ratio: float, reason: str, **changes: Any) -> dict[str, Any]:
    """A complete model of which Inductor's own kernels take a quarter of the GPU's time."""
    compared = {"ratio": ratio, "low": ratio - 0.01, "high": ratio + 0.01}
    looped = {"sample_seconds": 0.02} if ratio > 1 else {}
    names = [["triton_poi_fused_add_0", 3, 1.0], ["nvjet_gemm", 2, 3.0]]
    return {
        "model": "a model",
        "date": "2026-11-27T12:00:00+00:00",
        "complete": True,
        "gpu": "a GPU",
        "torch": "2",
        "looped": {"compared": {"nostall": compared, whole_models.COPY: compared}} | looped,
        "replayed": {"compared": {"nostall": compared}},
        "graphs": {"nostall": [{"reason": reason, "state": "inductor", "left": 1, "kernels": 4}]},
        "kernels": {"compile": {"launches": 5, "busy_s": 4.0, "by_name": names}},
        "starts_in_one_process": {
            "compile": {"first_s": 8.0},
            "nostall": {"first_s": 9.0, "until_chosen_s": 30.0, "chosen": True},
        },
        **changes,
    }


@pytest.mark.parametrize(
    ("reason", "refused"),
    [
        ("no gain beyond the noise", 0),
        ("the stitched version is not used: an element is off by 2 of its size", 1),
        ("not compared: AssertionError: expected size 4==4, stride 8==9 at dim=0", 1),
    ],
)
def test_a_row_has_the_refusals_and_the_share(reason: str, refused: int) -> None:
    cells = whole_models._model_row(record(1.1, reason))
    assert cells[1] == "1.100 [1.090, 1.110]" and cells[4] == "25%"
    assert cells[5:7] == ["4 (1 left)", "5 / –"]
    assert cells[7:] == ["not measured", "8 / 9", "30", str(refused), "2026-11-27 12:00"]


def test_products_are_counted_and_said_to_run_only_in_a_stitched_version() -> None:
    lines = ["8 x 8 x 8: one kernel, measured 1.2 x", "9 x 9 x 9: stays with cuBLAS: late"]
    graph = {"state": "inductor", "products": lines}
    assert whole_models._product_text([graph]) == "1 of 2 faster, not run"
    assert whole_models._product_text([graph | {"state": "stitched"}]) == "1 of 2 faster"
    assert whole_models._product_text([{"state": "inductor", "products": []}]) == "0 of 0 faster"


def test_the_means_are_judged_by_their_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ratios = {"a": 1.2, "b": 0.98, "c": 5.0}
    for name in ratios:
        (tmp_path / f"{name}.gain.json").touch()

    def load(path: Path) -> dict[str, Any]:
        name = path.name[0]
        return record(ratios[name], "no gain beyond the noise", complete=name != "c")

    monkeypatch.setattr(whole_models, "load", load)
    text = " ".join(" ".join(whole_models.models_section(tmp_path)).split())
    assert "A sample in a loop has steps back to back for 20 ms." in text
    assert "Those of a model are one step from an idle GPU" in text
    assert "2 of 3 measured models are complete." in text
    assert "Geometric mean in a loop: 1.084 [1.077, 1.092] (target 1.05: yes); lowest 0.980" in text
    assert "needs kernels that are 1.4 times as fast" in text
    assert "alone is between 0.980 and 1.200 in a loop" in text


def test_a_gain_is_the_share_of_time_that_goes_away() -> None:
    assert whole_models.inductor_share(record(1.0, "")) == pytest.approx(0.25)
    assert whole_models.inductor_share(record(1.0, "", kernels={})) is None


def test_the_samples_of_all_models_may_be_single_steps_or_none() -> None:
    single, looped = record(0.9, ""), record(1.1, "")
    assert whole_models._sample_text([single]).startswith("Samples in a loop are one step")
    assert "one step" not in whole_models._sample_text([looped])


def test_the_text_says_whether_kernels_over_lists_were_measured() -> None:
    def text(*names: str) -> str:
        samples = {name: [1.0] for name in names}
        row = {"ratio": 1.2, "low": 1.1, "high": 1.3, "null_low": 0.9, "null_high": 1.05}
        clock = {"samples_s": samples, "compared": dict.fromkeys(names, row)}
        return whole_models._list_text({"cases": {"AdamW": {"looped": clock, "replayed": clock}}})

    assert "measured without kernels over lists" in text("inductor", "nostall")
    assert "is 1.200 [1.100, 1.300] as CUDA graphs" in text("inductor", "stitched")
    assert "null there lies in [0.900, 1.050]" in text("inductor", "stitched")
    assert whole_models._list_text({"cases": {}}) == ""


def test_the_interval_of_a_mean_narrows_with_the_root_of_the_count() -> None:
    row = {"ratio": 1.2, "low": 1.2 / 1.1, "high": 1.2 * 1.1}
    assert whole_models.mean_interval([row]) == pytest.approx((1.2 / 1.1, 1.2 * 1.1))
    low, high = whole_models.mean_interval([row] * 4)
    assert (low, high) == pytest.approx((1.2 / 1.1**0.5, 1.2 * 1.1**0.5))


@pytest.mark.parametrize(
    ("value", "high", "verdict"),
    [(1.05, 1.06, "yes"), (1.04, 1.05, "within the interval"), (1.04, 1.049, "no")],
)
def test_a_target_in_the_interval_is_not_decided(value: float, high: float, verdict: str) -> None:
    assert whole_models._verdict(value, high, 1.05) == verdict


@pytest.mark.parametrize(
    ("ratio", "verdict"),
    [(1.065, "yes"), (1.055, "within the interval"), (1.045, "within the interval"), (1.03, "no")],
)
def test_an_interval_that_contains_the_target_does_not_decide(ratio: float, verdict: str) -> None:
    text = whole_models._mean_text([record(ratio, "")], "looped")
    assert f"(target 1.05: {verdict})" in text


def test_products_with_computed_operands_are_told_apart_by_what_they_compute() -> None:
    lines = [
        "8 x 8 x 8 bfloat16 with cast behind it and cast, copy in front: one kernel, measured "
        "1.250 x (1.2 to 1.3)",
        "8 x 8 x 8 bfloat16 with cast behind it and cast, mul in front, beside Inductor's kernels: "
        "stays with cuBLAS, measured 0.500 x (0.4 to 0.6)",
        "8 x 8 x 8 bfloat16 with cast, mul: one kernel, measured 2.000 x (1.9 to 2.1)",
        "8 x 8 x 8 bfloat16 with cast behind it and mul in front: stays with cuBLAS: late",
    ]
    graphs = {"nostall": [{"products": lines}, {}]}
    text = whole_models.prologue_text([{"model": "a model", "graphs": graphs}])
    assert "attention 1.25 to 1.25 (1 products) (faster in a model)" in text
    assert "norms 0.50 to 0.50 (1 products)" in text
    assert whole_models.prologue_text([record(1.1, "")]) == ""
