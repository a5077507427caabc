"""Tests of the workloads of rollouts."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from benchmarks.serving.engine.rollout_workloads import HISTORIES, GrowingRollout, parse_workload
from hypothesis import given
from hypothesis import strategies as st

from nostall.attach.rollouts.workload import OWN, Rollout, distinct_tokens
from nostall.core.errors import BadInput

SMALL = st.integers(1, 5)


@given(SMALL, SMALL, st.integers(0, 40), st.integers(1, 99), st.integers(0, 9), st.integers(0, 50))
def test_samples_share_what_the_workload_says(
    prompts: int, samples: int, more: int, new: int, system: int, growth: int
) -> None:
    workload = GrowingRollout(prompts, samples, system + more, new, system, growth)
    assert parse_workload(workload.text) == workload
    if not growth:
        plain = Rollout(prompts, samples, system + more, new, system)
        assert Rollout.parse(plain.text) == plain and plain.text == workload.text
        assert (plain.name, plain.longest) == (workload.name, workload.longest)
        assert plain.requests() == workload.requests()
    for generation in range(2 * workload.histories):
        found = workload.requests(generation)
        shared = system + more + growth * (generation // 2)
        assert [len(prompt) for prompt in found.cached] == [shared] * prompts
        assert found.outputs == [new] * (prompts * samples)
        assert len({tuple(prompt[:system]) for prompt in found.prompts}) == 1
        for index, prompt in enumerate(found.prompts):
            assert len(prompt) == shared + OWN
            assert prompt[:shared] == found.cached[index // samples]
        assert workload.requests(generation) == found


def test_a_history_continues_the_one_before() -> None:
    workload = parse_workload("2x3@64+16~32")
    assert workload.histories == HISTORIES
    found = [workload.requests(2 * number).cached for number in range(HISTORIES)]
    for before, after in pairwise(found):
        assert all(a == b[: len(a)] for a, b in zip(before, after, strict=True))


def test_distinct_tokens_are_those_of_pages_with_equal_beginnings() -> None:
    workload = Rollout(3, 4, 64, 8, system=32)
    assert distinct_tokens(workload.requests().prompts) == 32 + 3 * 32 + 12 * OWN
    # The same page behind another beginning is another page.
    assert distinct_tokens([[1] * 32, [2] * 16 + [1] * 16]) == 64


def test_requests_of_a_trace_share_the_blocks_that_have_equal_hashes(tmp_path: Path) -> None:
    rows = [(1300, [7, 8, 9]), (1024, [7, 8]), (600, [7, 4]), (512, [3])]
    lines = [
        json.dumps({"timestamp": 0, "input_length": n, "output_length": 5, "hash_ids": hashes})
        for n, hashes in rows
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    found = parse_workload("4@t.jsonl/4+24", tmp_path).requests()
    a, b, c, d = found.cached
    assert [len(prompt) for prompt in found.cached] == [325, 256, 150, 128]
    assert a[:256] == b
    assert a[:128] == c[:128]
    assert a[128:150] != c[128:]
    assert d != a[:128]
    assert [prompt[:-OWN] for prompt in found.prompts] == found.cached
    assert found.outputs == [24] * 4


def test_generated_tokens_of_a_trace_are_the_requests(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:15:0{n},9,{out}\n" for n, out in enumerate((5, 0, 3000, 7)))
    )
    workload = parse_workload("2x2@32+t.csv", tmp_path)
    assert workload.new is None
    assert workload.requests().outputs == [5, 1, 1024, 7]
    with pytest.raises(BadInput, match="has 4 requests; 6 are needed"):
        parse_workload("3x2@32+t.csv", tmp_path).requests()


@pytest.mark.parametrize(
    "text",
    ["", "8", "8x8", "8x8@64", "8x8@64+", "0x8@64+8", "8x0@64+8", "8x8@64+8/65", "8x8@131060+8",
     "8x8@64+8/", "-8x8@64+8", "8x8@64+none.txt", "8@none.jsonl+8", "8x8@130900+8~200"],
)  # fmt: skip
def test_bad_workloads_are_named(text: str) -> None:
    for parse in (parse_workload, Rollout.parse):
        with pytest.raises(BadInput, match="allowed"):
            parse(text)


@pytest.mark.parametrize("text", ["8x8@64+none.csv", "8@none.jsonl/4+8"])
def test_a_missing_trace_is_named(text: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"none\..* is missing"):
        parse_workload(text, tmp_path).requests()
