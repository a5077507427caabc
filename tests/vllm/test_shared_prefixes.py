"""Sequences with equal leading pages read them once, and nothing else is shared.

Driven by vLLM's builders on CPU tensors: ``make test-vllm``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

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

from nostall.attach.vllm import counts, gpu_backend, routing
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


class Cut(NamedTuple):
    """A step under ``auto``, and what FlashAttention computes of it."""

    query: list[int]
    served: str
    rest: list[int]


LEAST_DECODES = 4
CUTS = {
    "a new sample": Cut([1, 1, 1, 1, 1, 16], "verify", []),
    "new samples in front": Cut([7, 1, 1, 3, 1, 1], "verify", []),
    "padding": Cut([1, 1, 1, 1, 5, 0], "verify", []),
    "a prompt": Cut([1, 1, 1, 1, 2, 40], "mixed, in part", [40]),
    "a prompt, and padding": Cut([1, 1, 1, 1, 33, 0], "mixed, in part", [33, 0]),
    "a prompt before a sample": Cut([1, 1, 1, 1, 33, 16], "mixed, in part", [33, 16]),
    # max_num_seqs is 12, so that the tables hold 24 tokens.
    "as many tokens as fit": Cut([1, 1, 1, 1, 20, 0], "verify", []),
    "more tokens than fit": Cut([1, 1, 1, 1, 20, 1], "verify, in part", [1]),
}


@pytest.fixture
def by_flash_attention(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Query lengths of what FlashAttention computed, of each of its calls; ``auto`` is chosen."""

    def is_faster(shape: Any, batch: Any, sequences: int, sms: int, gpu: str = "") -> bool:
        return sequences >= LEAST_DECODES and shape.window == 0

    patch(monkeypatch, "auto")
    monkeypatch.setattr(routing, "is_faster_than_fa3", is_faster)
    forward = gpu_backend.flash_attn.FlashAttentionImpl.forward
    calls: list[list[int]] = []

    def watched(self: Any, *arguments: Any, **results: Any) -> Any:
        calls.append(arguments[5].query_start_loc.diff().tolist())
        return forward(self, *arguments, **results)

    monkeypatch.setattr(gpu_backend.flash_attn.FlashAttentionImpl, "forward", watched)
    return calls


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("bounds", ["host", "device"])
def test_a_step_with_new_samples_reads_a_shared_prefix_once(
    cut: Cut, bounds: str, by_flash_attention: list[list[int]]
) -> None:
    group = shared_group()
    changes = {"seq_lens_cpu_upper_bound": None} if bounds == "device" else {}
    group.builder.build(0, common([1] * 6, LENGTHS, group.table))  # finds FlashAttention's window
    about = common(cut.query, LENGTHS, group.table, **changes)
    metadata = group.builder.build(0, about)
    group.check(metadata)
    tables = getattr(metadata, STEP).tables
    assert (tables.builds, tables.shared) == (1, 1)
    assert by_flash_attention == ([cut.rest] if cut.rest else [])
    assert counts.counts()["served"] == {"decode": 1, cut.served: 1}
    assert metadata.num_actual_tokens == sum(cut.query)


def test_the_rest_of_a_step_is_in_no_group(by_flash_attention: list[list[int]]) -> None:
    """The pages of a prompt may be those that its siblings read, and be computed in this step."""
    group = shared_group()
    group.table[5, :9] = group.table[0, :9]
    metadata = group.builder.build(0, common([1, 1, 1, 1, 1, 150], LENGTHS, group.table))
    group.check(metadata)
    assert len(getattr(metadata, STEP).batch.kv_lengths) == 5
    assert by_flash_attention == [[150]]


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ([40, 1, 1, 1, 1, 1], "mixed steps on which FlashAttention is as fast or faster"),
        ([1, 1, 1, 8, 8, 8], "verify steps on which FlashAttention is as fast or faster"),
        ([40, 40, 50, 33, 33, 40], "prefill steps"),
    ],
)
def test_steps_of_few_decodes_in_front_are_left(
    query: list[int], reason: str, by_flash_attention: list[list[int]]
) -> None:
    group = shared_group()
    metadata = group.builder.build(0, common(query, LENGTHS, group.table))
    group.check(metadata)
    assert counts.counts()["left to vLLM"] == {reason: 1}
    assert by_flash_attention == [query]


def test_with_speculation_decodes_alone_are_served(by_flash_attention: list[list[int]]) -> None:
    """Graphs of verifies are captured, and hold one kernel for all of their size."""
    group = shared_group(speculative_config=SPECULATION)
    for query in ([1, 1, 1, 1, 4, 4], [1, 1, 1, 1, 1, 40]):
        group.check(group.builder.build(0, common(query, LENGTHS, group.table)))
    group.check(group.builder.build(0, common([1] * 6, LENGTHS, group.table)))
    assert counts.counts()["served"] == {"decode": 1}
    assert counts.counts()["left to vLLM"] == {"verify steps": 1, "mixed steps": 1}


def test_a_step_is_not_cut_beside_layers_of_flash_attention(
    by_flash_attention: list[list[int]],
) -> None:
    """The schedules of the whole step and of its rest would lie in one buffer."""
    layers = {"a": layer(), "capped": layer(logits_soft_cap=30.0)}
    group = Group(FULL, layers)
    group.table[group.table == 0] = 399
    group.check(group.builder.build(0, common([1, 1, 1, 1, 8, 8], LENGTHS, group.table)))
    assert counts.counts()["served"] == {"verify": 1}
    group.check(group.builder.build(0, common([1, 1, 1, 1, 8, 40], LENGTHS, group.table)))
    assert counts.counts()["served"] == {"verify": 1}
    assert "does not serve all layers" in str(counts.counts()["left to vLLM"])


def test_one_schedule_is_made_for_a_cut_step(
    by_flash_attention: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the whole step or of its rest: both would lie in one buffer."""
    made: list[tuple[int, bool]] = []
    builder = gpu_backend.flash_attn.FlashAttentionMetadataBuilder
    build = builder.build

    def watched(self: Any, prefix: int, about: Any, fast_build: bool = False) -> Any:
        made.append((about.num_reqs, not fast_build))
        return build(self, prefix, about, fast_build)

    monkeypatch.setattr(builder, "build", watched)
    group = shared_group()
    for _ in range(2):
        group.check(group.builder.build(0, common([1, 1, 1, 1, 1, 40], LENGTHS, group.table)))
    # The first build finds the window of FlashAttention's schedules.
    assert made == [(6, True), (1, False), (6, False), (1, True)]


def test_a_cut_step_renews_the_tables_of_a_graph_of_its_size(
    by_flash_attention: list[list[int]],
) -> None:
    group = shared_group()
    captured = group.builder.build_for_cudagraph_capture(common([1] * 12, [9] * 12, group.table))
    tables = getattr(captured, STEP).tables
    query, keys = [1] * 10 + [2, 0], [50] * 11 + [0]
    group.check(group.builder.build(0, common(query, keys, group.table)))
    assert tables.builds == 2


def test_a_layer_that_refuses_a_cut_step_computes_all_of_it(
    by_flash_attention: list[list[int]],
) -> None:
    group = shared_group()
    query = [1, 1, 1, 1, 1, 40]
    metadata = group.builder.build(0, common(query, LENGTHS, group.table))
    metadata.block_table = group.table[:6].clone()
    group.check(metadata)
    assert by_flash_attention == [query]
    assert "layers that get metadata whose tensors were replaced" in counts.counts()["left to vLLM"]
