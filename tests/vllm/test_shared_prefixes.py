"""Decodes of sequences with equal leading pages read them once, and nothing else is shared.

Driven by vLLM's builders on CPU tensors: ``make test-vllm``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; run `make test-vllm`")

import torch
from cpu_group import (
    DIMS,
    KV_HEADS,
    PAGE,
    Group,
    HostGroupedTables,
    HostTables,
    common,
    layer,
    patch,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from nostall.attach.vllm import counts
from nostall.attach.vllm.gpu_backend import STEP

FIELDS = {"block_size": PAGE, "num_kv_heads": KV_HEADS, "head_size": DIMS, "dtype": torch.float32}
FULL = FullAttentionSpec(**FIELDS)
LENGTHS = [150, 140, 131, 160, 33, 150]


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch)


def shared_group(pages: int = 8, **changes: Any) -> Group:
    """A group of one layer; four of six sequences have their first pages in common."""
    group = Group(FULL, {"a": layer()}, **changes)
    group.table[group.table == 0] = 399  # vLLM gives the null block to nobody.
    for member in (1, 3, 5):
        group.table[member, :pages] = group.table[0, :pages]
    return group


def grouped() -> Any:
    (tables,) = [made for made in HostTables.made if isinstance(made, HostGroupedTables)]
    return tables


def test_a_step_reads_a_shared_prefix_once_and_computes_the_same() -> None:
    group = shared_group()
    metadata = group.builder.build(0, common([1] * 6, LENGTHS, group.table))
    group.check(metadata)
    assert (grouped().builds, grouped().shared) == (1, 1)
    assert counts.counts()["shared prefixes"] == {
        "steps": 1,
        "with shared prefixes": 1,
        "beyond the capacity": 0,
        "saved us (modelled)": 0,
    }


def test_the_same_graph_serves_steps_with_and_without_sharing() -> None:
    group = shared_group()
    alone = Group(FULL, {"a": layer()}, seed=3)
    captured = group.builder.build_for_cudagraph_capture(common([1] * 6, LENGTHS, alone.table))
    tables = getattr(captured, STEP).tables
    for table, shared in ((group.table, 1), (alone.table, 1), (group.table, 2)):
        metadata = group.builder.build(0, common([1] * 6, LENGTHS, table))
        assert getattr(metadata, STEP).tables is tables
        group.check(metadata)
        assert tables.shared == shared


def test_padding_shares_nothing() -> None:
    group = shared_group()
    group.table[2] = group.table[0]
    group.table[4] = 0
    keys = [150, 140, 0, 160, 0, 150]
    metadata = group.builder.build(0, common([1, 1, 0, 1, 0, 1], keys, group.table))
    group.check(metadata)
    assert grouped().shared == 1


def test_a_step_without_lengths_on_the_host_is_served() -> None:
    group = shared_group()
    step = common([1] * 6, LENGTHS, group.table, seq_lens_cpu_upper_bound=None)
    group.check(group.builder.build(0, step))
    assert grouped().shared == 1


SPECULATION = SimpleNamespace(method="ngram", num_speculative_tokens=3)


@pytest.mark.parametrize("query", [[4] * 6, [1, 4, 2, 4, 3, 1], [4, 0, 4, 4, 0, 4]])
def test_verifies_read_a_shared_prefix_once(query: list[int]) -> None:
    group = shared_group(speculative_config=SPECULATION)
    metadata = group.builder.build(0, common(query, LENGTHS, group.table))
    group.check(metadata)
    assert (grouped().builds, grouped().shared) == (1, 1)
    assert counts.counts()["served"] == {"verify": 1}
    decodes = group.builder.build(0, common([1] * 6, LENGTHS, group.table))
    group.check(decodes)
    # Both kinds have one plan, and so one set of tables.
    assert getattr(decodes, STEP).tables is getattr(metadata, STEP).tables is grouped()


def test_chunks_of_more_tokens_than_speculation_makes_are_left() -> None:
    """The tables hold max_num_seqs * (1 + drafts) tokens: 48."""
    group = shared_group(speculative_config=SPECULATION)
    for length, is_served in ((8, True), (9, False)):
        about = common([length] * 6, [150, 140, 131, 160, 33, 150], group.table)
        metadata = group.builder.build(0, about)
        group.check(metadata)
        assert hasattr(metadata, STEP) == is_served
    assert "more tokens than speculation makes" in str(counts.counts()["left to vLLM"])


def test_without_speculation_short_chunks_have_no_groups() -> None:
    group = shared_group()
    group.check(group.builder.build(0, common([4] * 6, LENGTHS, group.table)))
    assert grouped().builds == 0
    assert counts.counts()["served"] == {"verify": 1}


def test_a_window_has_no_groups() -> None:
    spec = SlidingWindowSpec(**FIELDS, sliding_window=100)
    group = Group(spec, {"a": layer(100)})
    group.check(group.builder.build(0, common([1] * 6, LENGTHS, group.table)))
    assert not any(isinstance(made, HostGroupedTables) for made in HostTables.made)
