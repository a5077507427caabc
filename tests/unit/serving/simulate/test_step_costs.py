"""The model of step costs: it finds known coefficients, and names what it cannot use."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nostall.serving.errors import BadSchedule
from nostall.serving.simulate.step_costs import StepContent, fit_step_costs, load_step_costs


def true_seconds(content: StepContent) -> float:
    tokens = content.prefill_tokens + content.decode_tokens
    linear = max(0.006, 2.5e-5 * tokens)
    return linear + 4e-11 * content.prefill_pairs + 4e-8 * content.decode_keys + 0.001


def contents(count: int, seed: int) -> list[StepContent]:
    rng = np.random.default_rng(seed)
    drawn = []
    while len(drawn) < count:
        prefill = int(rng.choice([0, 0, 64, 256, 1024, 4096]))
        decodes = int(rng.choice([0, 1, 16, 64, 256]))
        if prefill + decodes:
            keys, before = int(rng.integers(1, 4096)), int(rng.integers(0, 8192))
            pairs = prefill * before + prefill * (prefill + 1) // 2
            drawn.append(StepContent(prefill, pairs, decodes, decodes * keys))
    return drawn


def test_the_fit_predicts_steps_that_it_has_not_seen() -> None:
    known = contents(300, seed=0)
    noise = np.random.default_rng(1).normal(1, 0.01, len(known))
    costs = fit_step_costs(known, np.array([true_seconds(c) for c in known]) * noise, 1, "test")
    assert costs.median_error < 0.03
    for content in contents(50, seed=2):
        assert costs.seconds(content) == pytest.approx(true_seconds(content), rel=0.15)
    assert not costs.extrapolates(known[0])
    assert costs.extrapolates(StepContent(0, 0, 257, 10))


def test_no_part_of_a_step_makes_it_faster() -> None:
    """Noise must not fit a negative cost of keys, which would let long contexts speed up steps."""
    rng = np.random.default_rng(3)
    known = contents(200, seed=4)
    seconds = np.array([0.01 - 1e-9 * content.decode_keys for content in known])
    costs = fit_step_costs(known, seconds * rng.normal(1, 0.02, len(known)), 1, "test")
    assert min(costs.prefill_s, costs.pair_s, costs.key_s, *costs.seconds_at) >= 0


@given(st.integers(1, 400), st.lists(st.integers(0, 10**6), min_size=1, max_size=5))
def test_decode_steps_together_cost_what_single_ones_cost(tokens: int, keys: list[int]) -> None:
    known = contents(60, seed=5)
    costs = fit_step_costs(known, np.array([true_seconds(c) for c in known]), 1, "test")
    together = costs.decode_seconds(tokens, np.array(keys, np.float64)).tolist()
    assert together == [costs.seconds(StepContent(0, 0, tokens, count)) for count in keys]


def document(count: int) -> dict[str, object]:
    samples = [
        {**content._asdict(), "seconds": true_seconds(content)} for content in contents(count, 6)
    ]
    head = {"format": "nostall-step-costs-1", "gpu": "G", "engine": "E", "model": "M"}
    return {**head, "kv_tokens": 1000, "samples": samples, "date": "any"}


def test_a_cost_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(document(40)))
    costs = load_step_costs(file)
    assert (costs.samples, costs.kv_tokens, costs.source) == (40, 1000, "G, E, M")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "format: Input should be 'nostall-step-costs-1'.*serving.step_costs"),
        ({"samples": [{"seconds": 0}]}, "samples.0"),
        ({"kv_tokens": 0}, "kv_tokens"),
        ({"samples": []}, "has 0 samples; allowed are 20 or more"),
    ],
)
def test_another_file_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(document(30) | change))
    with pytest.raises(BadSchedule, match=message):
        load_step_costs(file)
