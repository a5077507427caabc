"""The GPU back end computes each layer of each step from its own pages, windows and lengths.

Driven by vLLM's classes and model runners on CPU tensors: ``make test-vllm``.
"""

from __future__ import annotations

import inspect
import random
from copy import copy
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; run `make test-vllm`")

import torch
from cpu_group import (
    DIMS,
    KV_HEADS,
    LONGEST,
    PAGE,
    SCALED,
    Group,
    HostTables,
    common,
    layer,
    patch,
)
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

from nostall.attach.vllm import counts, gpu_backend
from nostall.attach.vllm.gpu_backend import STEP

FIELDS = {"block_size": PAGE, "num_kv_heads": KV_HEADS, "head_size": DIMS, "dtype": torch.float32}
FULL = FullAttentionSpec(**FIELDS)
DECODES = ([1] * 6, [5, 40, 33, 100, 17, 64])
MIXED = ([1, 1, 40, 1, 3, 1], [9, 30, 60, 5, 77, 150])


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch)


def step(group: Group, lengths: tuple[list[int], list[int]], **changes: Any) -> Any:
    return common(*lengths, group.table, **changes)


@pytest.mark.parametrize("lengths", [DECODES, MIXED, ([4] * 5, [4, 90, 50, 31, 16])])
def test_a_group_computes_its_layers(lengths: tuple[list[int], list[int]]) -> None:
    group = Group(FULL, {"a": layer(), "b": layer()})
    metadata = group.builder.build(0, step(group, lengths))
    group.check(metadata)
    assert hasattr(metadata, STEP)
    assert sum(counts.counts()["served"].values()) == 1


def test_metadata_that_was_copied_for_another_group_is_left_to_flash_attention() -> None:
    first, second = Group(FULL, {"a": layer()}), Group(FULL, {"b": layer()}, seed=1)
    metadata = first.builder.build(0, step(first, DECODES))
    table, slots = second.table[:6], torch.zeros(6, dtype=torch.int64)
    by_vllm = second.builder.update_block_table(metadata, table, slots)
    second.check(by_vllm)
    by_hand = copy(metadata)
    by_hand.block_table = table
    second.check(by_hand)
    assert "layers that get metadata whose tensors were replaced" in counts.counts()["left to vLLM"]
    first.check(metadata)


def test_each_method_that_makes_metadata_is_tested_here() -> None:
    """A new one of vLLM must be looked at before its version is supported."""
    known = {
        "build": "each test",
        "build_for_cudagraph_capture": "test_a_captured_graph_reads_the_tables_of_each_step",
        "build_for_drafting": "test_steps_of_drafts_are_left",
        "update_block_table": "test_metadata_that_was_copied_for_another_group...",
        "update_draft_decode_metadata": "test_full_graphs_are_captured_of_equal_lengths_only",
        "use_cascade_attention": "gives no metadata",
        "get_cudagraph_support": "test_full_graphs_are_captured_of_equal_lengths_only",
        "get_varlen_cudagraph_max_query_len": "the same",
    }
    names = {
        name
        for base in (gpu_backend.NostallMetadataBuilder, AttentionMetadataBuilder)
        for name, _ in inspect.getmembers(base, callable)
        if not name.startswith("_")
    }
    assert names <= set(known)


def test_full_graphs_are_captured_of_equal_lengths_only() -> None:
    group = Group(FULL, {"a": layer()})
    builder = group.builder
    support = builder.get_cudagraph_support(None, FULL)
    assert support is builder._cudagraph_support is AttentionCGSupport.UNIFORM_BATCH
    if hasattr(builder, "get_varlen_cudagraph_max_query_len"):
        assert builder.get_varlen_cudagraph_max_query_len(None, FULL) is None
    assert not builder.supports_update_block_table
    assert not builder.supports_draft_decode_metadata_update


class Graph:
    """A captured step: its kernels run again over the tensors and tables of its capture."""

    def __init__(self, group: Group, query: int, sequences: int) -> None:
        self.group, self.query, self.sequences = group, query, sequences
        self.starts = torch.arange(sequences + 1, dtype=torch.int32) * query
        self.lengths = torch.full((sequences,), query, dtype=torch.int32)
        self.metadata = group.builder.build_for_cudagraph_capture(self.step([query] * sequences))
        self.captured = getattr(self.metadata, STEP)

    def step(self, keys: list[int], real: int | None = None, **changes: Any) -> Any:
        """A step in the graph's tensors; the sequences after the ``real`` ones are padding."""
        real = self.sequences if real is None else real
        query = [self.query] * real + [0] * (self.sequences - real)
        self.starts[1:] = torch.tensor(query).cumsum(0)
        self.lengths[:] = torch.tensor(keys[:real] + [0] * (self.sequences - real))
        return common(query, self.lengths.tolist(), self.group.table, **{
            "query_start_loc": self.starts, "seq_lens": self.lengths,
            "num_actual_tokens": self.query * self.sequences, **changes,
        })  # fmt: skip

    def replay(self, metadata: Any) -> None:
        """Check what the captured kernels compute for a step."""
        setattr(metadata, STEP, self.captured)
        metadata.block_table = self.captured.batch.block_table
        self.group.check(metadata)


@pytest.mark.parametrize("seed", range(4))
def test_a_captured_graph_reads_the_tables_of_each_step(seed: int) -> None:
    draw = random.Random(seed)
    group = Group(FULL, {"a": layer(), "b": layer()})
    graphs = [Graph(group, query, sequences) for query, sequences in ((1, 4), (1, 8), (3, 4))]
    for _ in range(12):
        graph = draw.choice(graphs)
        real = draw.randint(1, graph.sequences)
        keys = [draw.randint(graph.query, LONGEST) for _ in range(graph.sequences)]
        # Whatever makes nostall leave a step must not leave the graph with old tables.
        changes = draw.choice(
            [{}, {}, {"seq_lens_cpu_upper_bound": None}, {"causal": False}, {"fast_build": True}]
        )
        fast = changes.pop("fast_build", False)
        metadata = group.builder.build(0, graph.step(keys, real, **changes), fast)
        graph.replay(metadata)
        other = group.builder.build(0, step(group, MIXED))  # runs without a graph
        group.check(other)


def test_a_mixed_step_of_the_size_of_a_captured_one_renews_its_tables() -> None:
    group = Group(FULL, {"a": layer()})
    captured = getattr(
        group.builder.build_for_cudagraph_capture(step(group, ([1] * 12, [1] * 12))), STEP
    )
    before = captured.tables.builds
    group.check(group.builder.build(0, step(group, ([1] * 11 + [40], [50] * 12))))
    assert captured.tables.builds == before  # of another number of tokens
    group.check(group.builder.build(0, step(group, ([2, 0] + [1] * 10, [50, 0] + [50] * 10))))
    assert captured.tables.builds == before + 1


def test_lengths_that_only_the_device_knows_are_read_from_it() -> None:
    group = Group(FULL, {"a": layer()})
    metadata = group.builder.build(0, step(group, DECODES, seq_lens_cpu_upper_bound=None))
    assert hasattr(metadata, STEP)
    group.check(metadata)


def test_steps_of_drafts_are_left() -> None:
    group = Group(FULL, {"a": layer()})
    metadata = group.builder.build_for_drafting(step(group, DECODES), 0)
    assert not hasattr(metadata, STEP)
    assert counts.counts()["left to vLLM"] == {"steps of drafts": 1}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"causal": False}, "shared prefix or without a causal mask"),
        ({"causal": torch.ones(6, dtype=torch.int32)}, "shared prefix or without a causal mask"),
    ],
)
def test_steps_that_are_not_causal_are_left(changes: dict[str, Any], reason: str) -> None:
    group = Group(FULL, {"a": layer()})
    metadata = group.builder.build(0, step(group, DECODES, **changes))
    assert not hasattr(metadata, STEP)
    assert reason in str(counts.counts()["left to vLLM"])


def test_layers_of_a_merged_group_have_their_own_windows() -> None:
    """Without vLLM's hybrid cache manager all layers share a group whose spec has the window."""
    merged = FullAttentionSpec.merge([FULL, FullAttentionSpec(**FIELDS, sliding_window=20)])
    layers = {"a": layer(20), "full": layer(), "b": layer(20)}
    group = Group(merged, layers)
    group.check(group.builder.build(0, step(group, MIXED)))
    assert [impl._refusal is None for impl in layers.values()] == [True, False, True]
    left = counts.counts()["left to vLLM"]
    assert left == {"layers whose heads or window are not those of their group's tables": 1}


def test_heads_are_the_layers_own() -> None:
    layers = {"a": layer(num_heads=2), "b": layer(num_heads=2), "c": layer(num_heads=8)}
    group = Group(FULL, layers)
    group.check(group.builder.build(0, step(group, MIXED)))
    assert layers["a"]._refusal is None
    assert layers["c"]._refusal == "no tables of their heads, window and pages"


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_cache_dtype": "fp8_e5m2"}, {"alibi_slopes": [1.0] * 4}, {"logits_soft_cap": 30.0},
        {"scale": 1.0}, {"attn_type": "encoder_only"},
    ],
)  # fmt: skip
def test_nothing_is_built_or_counted_where_all_layers_are_refused(changes: dict[str, Any]) -> None:
    group = Group(FULL, {"a": layer(**changes), "b": layer(**changes)})
    metadata = group.builder.build(0, step(group, DECODES))
    assert not hasattr(metadata, STEP)
    assert not HostTables.made
    assert counts.counts()["served"] == {}


FP8_SPEC = FullAttentionSpec(**{**FIELDS, "dtype": torch.uint8})


@pytest.mark.parametrize("lengths", [DECODES, MIXED])
def test_a_cache_of_fp8_is_read_with_its_scales(lengths: tuple[list[int], list[int]]) -> None:
    group = Group(FP8_SPEC, {"a": layer(kv_cache_dtype="fp8"), "b": layer(kv_cache_dtype="fp8")})
    metadata = group.builder.build(0, step(group, lengths))
    group.check(metadata)
    assert hasattr(metadata, STEP)
    assert sum(counts.counts()["served"].values()) == 1
    assert counts.counts()["left to vLLM"] == {}


def test_scales_of_single_heads_are_left() -> None:
    group = Group(FP8_SPEC, {"a": layer(kv_cache_dtype="fp8")})
    metadata = group.builder.build(0, step(group, DECODES))
    query = torch.randn(6, 4, DIMS).to(torch.float8_e4m3fn)
    by_head = SimpleNamespace(**{**vars(SCALED), "_k_scale": torch.ones(KV_HEADS)})
    with pytest.raises(RuntimeError):  # the stand-in for FlashAttention
        group.layers["a"].forward(
            by_head, query, None, None, group.cache, metadata, output=torch.zeros(6, 4, DIMS)
        )
    assert "layers with a scale for each head" in counts.counts()["left to vLLM"]


def test_a_cache_of_fp8_is_not_among_the_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch, "auto")
    group = Group(FP8_SPEC, {"a": layer(kv_cache_dtype="fp8")})
    assert not HostTables.made
    assert "NOSTALL_VLLM_ATTENTION=all serves it" in str(counts.counts()["left to vLLM"])
    group.check(group.builder.build(0, step(group, DECODES)))


def test_a_refused_layer_beside_a_served_one_is_left() -> None:
    layers = {"a": layer(), "capped": layer(logits_soft_cap=30.0)}
    group = Group(FULL, layers)
    group.check(group.builder.build(0, step(group, DECODES)))
    assert layers["capped"]._refusal == "a soft cap"
    assert sum(counts.counts()["served"].values()) == 1


@pytest.mark.parametrize(
    ("part", "changes", "reason"),
    [
        ("model_config", {"is_mm_prefix_lm": True}, "ranges that are not causal"),
        ("model_config", {"rswa_window": 128}, "reference window"),
        ("model_config", {"dtype": torch.bfloat16}, "a cache of torch.float32"),
        ("speculative_config", {"method": "eagle"}, "a draft model"),
    ],
)
def test_models_that_change_steps_on_the_device_are_left(
    part: str, changes: dict[str, Any], reason: str
) -> None:
    from cpu_group import config

    layers = {"a": layer()}
    whole = getattr(config(layers), part) or SimpleNamespace()
    vars(whole).update(changes)
    group = Group(FULL, layers, **{part: whole})
    assert not hasattr(group.builder.build(0, step(group, DECODES)), STEP)
    assert reason in str(counts.counts()["left to vLLM"])


def test_a_cache_of_another_dtype_is_left() -> None:
    group = Group(FULL, {"a": layer()})
    metadata = group.builder.build(0, step(group, DECODES))
    impl = group.layers["a"]
    query = torch.randn(6, impl.num_heads, DIMS)
    result = torch.zeros_like(query)
    other = group.cache.double()
    with pytest.raises(RuntimeError, match="Double"):  # the stand-in for FlashAttention
        impl.forward(None, query, None, None, other, metadata, output=result)
    assert "layers that get a cache of another dtype" in counts.counts()["left to vLLM"]


@pytest.mark.parametrize("wrapper", ["fast prefill", "chunks"])
def test_builders_that_vllm_wraps_are_left(wrapper: str) -> None:
    """They give nostall's builder other sequences than the layers' metadata has in the end."""
    from vllm.model_executor.layers.attention import chunked_local_attention as chunks
    from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend

    own = gpu_backend.NostallAttentionBackend
    backend = (
        create_fast_prefill_custom_backend("Fast", own)
        if wrapper == "fast prefill"
        else chunks.create_chunked_local_attention_backend(own, 32)
    )
    group = Group(FULL, {"a": layer()}, backend=backend)
    assert group.builder._tables == {}
    assert not HostTables.made
    assert group.layers["a"]._refusal is not None
    assert "its steps are changed by vLLM's" in str(counts.counts()["left to vLLM"])


def test_measured_steps_alone_are_served_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 64 elements were not measured, so no tables are made for them."""
    patch(monkeypatch, "auto")
    group = Group(FULL, {"a": layer()})
    assert not HostTables.made
    group.check(group.builder.build(0, step(group, DECODES)))


def test_vllm_lowers_full_graphs_to_those_of_equal_lengths() -> None:
    from vllm.config import CompilationConfig, CUDAGraphMode

    asked = CompilationConfig(
        mode=0, cudagraph_mode=CUDAGraphMode.FULL, cudagraph_capture_sizes=[1, 8]
    )
    asked.max_cudagraph_capture_size = 8
    support = gpu_backend.NostallMetadataBuilder.get_cudagraph_support(None, FULL)
    found = asked.resolve_cudagraph_mode_and_sizes(support, "CUSTOM")
    assert found.mixed_mode() is not CUDAGraphMode.FULL
    assert found.decode_mode() is CUDAGraphMode.FULL


@pytest.fixture
def schedules(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether FlashAttention's builder made its schedule, for each of its builds."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    made: list[bool] = []
    build = FlashAttentionMetadataBuilder.build

    def watched(self: Any, prefix: int, about: Any, fast_build: bool = False) -> Any:
        made.append(not fast_build)
        return build(self, prefix, about, fast_build)

    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", watched)
    return made


def test_a_step_that_only_nostall_reads_has_no_schedule(schedules: list[bool]) -> None:
    group = Group(FULL, {"a": layer(), "b": layer()})
    for _ in range(3):
        group.check(group.builder.build(0, step(group, DECODES)))
    # The first build finds the window of FlashAttention's schedules.
    assert schedules == [True, False, False]
    group.check(group.builder.build(0, step(group, DECODES, causal=torch.ones(6).int())))
    assert schedules[-1]


def test_a_layer_of_flash_attention_beside_nostalls_has_a_schedule(schedules: list[bool]) -> None:
    group = Group(FULL, {"a": layer(), "capped": layer(logits_soft_cap=30.0)})
    for _ in range(2):
        group.builder.build(0, step(group, DECODES))
    assert schedules == [True, True]


def test_a_layer_that_nostall_does_not_know_has_a_schedule(schedules: list[bool]) -> None:
    group = Group(FULL, {"a": layer(), "other": SimpleNamespace()})
    for _ in range(2):
        group.builder.build(0, step(group, DECODES))
    assert schedules == [True, True]


def test_a_graph_of_flash_attention_has_a_schedule(schedules: list[bool]) -> None:
    group = Group(FULL, {"a": layer()})
    left = step(group, ([1] * 4, [1] * 4), causal=torch.ones(4, dtype=torch.int32))
    group.builder.build_for_cudagraph_capture(left)
    for lengths, is_made in ((([1] * 4, [9] * 4), True), (([1] * 5, [9] * 5), False)):
        group.builder.build(0, step(group, lengths))
        assert schedules[-1] == is_made
