"""vLLM's two model runners give each cache group of the GPU back end its own tables."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; run `make test-vllm`")

import torch
from cpu_group import (
    DIMS,
    KV_HEADS,
    LONGEST,
    PAGE,
    SEQUENCES,
    Group,
    HostTables,
    common,
    layer,
    patch,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from nostall.attach.vllm import gpu_backend, routing
from nostall.attach.vllm.gpu_backend import STEP

FIELDS = {"block_size": PAGE, "num_kv_heads": KV_HEADS, "head_size": DIMS, "dtype": torch.float32}
FULL = FullAttentionSpec(**FIELDS)
DECODES = ([1] * 6, [5, 40, 33, 100, 17, 64])


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch)


WINDOW = SlidingWindowSpec(**FIELDS, sliding_window=20)


def two_specs() -> list[Group]:
    """Cache groups of a hybrid model: two of one spec, and one with a window."""
    return [
        Group(FULL, {"a": layer()}, seed=1),
        Group(FULL, {"b": layer()}, seed=2),
        Group(WINDOW, {"c": layer(20)}, seed=3),
    ]


@pytest.mark.parametrize("capture", [False, True])
def test_the_first_model_runner(capture: bool) -> None:
    """vLLM's own `_build_attention_metadata`, which copies metadata where a builder allows it."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.utils import AttentionGroup

    groups = two_specs()
    query, keys = DECODES
    about = common(query, keys, groups[0].table)
    tables = [SimpleNamespace(get_device_tensor=lambda n, g=g: g.table[:n]) for g in groups]
    backend = gpu_backend.NostallAttentionBackend
    runner = SimpleNamespace(
        kv_cache_config=SimpleNamespace(
            kv_cache_groups=[
                SimpleNamespace(kv_cache_spec=g.spec, layer_names=list(g.layers)) for g in groups
            ]
        ),
        attn_groups=[
            [AttentionGroup(backend, list(g.layers), g.spec, i, metadata_builders=[g.builder])]
            for i, g in enumerate(groups)
        ],
        max_model_len=LONGEST,
        optimistic_seq_lens_cpu=about.seq_lens,
        seq_lens=about.seq_lens,
        query_start_loc=SimpleNamespace(gpu=about.query_start_loc, cpu=about.query_start_loc),
        positions=torch.zeros(64),
        input_batch=SimpleNamespace(
            block_table=tables,
            num_computed_tokens_cpu_tensor=about.seq_lens,
            num_prompt_tokens_cpu_tensor=about.seq_lens,
        ),
        routed_experts_initialized=False,
        use_async_spec_decode=False,
        is_mm_prefix_lm=False,
        model_config=SimpleNamespace(rswa_window=None),
        dcp_world_size=1,
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False, use_replayssm=False),
        speculative_config=None,
        drafter=None,
        device="cpu",
        _get_encoder_seq_lens=lambda *arguments, **options: (None, None),
    )
    found, _ = GPUModelRunner._build_attention_metadata(
        runner,
        num_tokens=len(query),
        num_reqs=len(query),
        max_query_len=1,
        for_cudagraph_capture=capture,
        slot_mappings={i: torch.zeros(len(query), dtype=torch.int64) for i in range(len(groups))},
    )
    for group in groups:
        for name in group.layers:
            assert hasattr(found[name], STEP)
            group.check(found[name])
    assert [made.builds for made in HostTables.made if made.builds] == [1, 1, 1]


@pytest.mark.parametrize("capture", [False, True])
def test_the_second_model_runner(capture: bool) -> None:
    from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
    from vllm.v1.worker.utils import AttentionGroup

    groups = two_specs()
    query, keys = DECODES
    about = common(query, keys, groups[0].table)
    backend = gpu_backend.NostallAttentionBackend
    found = build_attn_metadata(
        attn_groups=[
            [AttentionGroup(backend, list(g.layers), g.spec, i, metadata_builders=[g.builder])]
            for i, g in enumerate(groups)
        ],
        num_reqs=len(query),
        num_tokens=len(query),
        query_start_loc_gpu=about.query_start_loc,
        query_start_loc_cpu=about.query_start_loc,
        max_query_len=1,
        seq_lens=about.seq_lens,
        seq_lens_cpu_upper_bound=about.seq_lens,
        max_seq_len=max(keys),
        block_tables=[g.table[: len(query)] for g in groups],
        slot_mappings=torch.zeros(len(groups), len(query), dtype=torch.int64),
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
        for_cudagraph_capture=capture,
    )
    for group in groups:
        for name in group.layers:
            assert hasattr(found[name], STEP)
            group.check(found[name])


def test_a_prompt_beside_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second runner sorts sequences by their tokens; FlashAttention computes the last ones."""
    from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
    from vllm.v1.worker.utils import AttentionGroup

    patch(monkeypatch, "auto")
    monkeypatch.setattr(routing, "is_faster_than_fa3", lambda shape, *_: shape.window == 0)
    groups = two_specs()[:2]
    query, keys = [1, 1, 1, 5, 16, 40], [5, 40, 33, 100, 17, 64]
    about = common(query, keys, groups[0].table)
    backend = gpu_backend.NostallAttentionBackend
    found = build_attn_metadata(
        attn_groups=[
            [AttentionGroup(backend, list(g.layers), g.spec, i, metadata_builders=[g.builder])]
            for i, g in enumerate(groups)
        ],
        num_reqs=len(query),
        num_tokens=sum(query),
        query_start_loc_gpu=about.query_start_loc,
        query_start_loc_cpu=about.query_start_loc,
        max_query_len=max(query),
        seq_lens=about.seq_lens,
        seq_lens_cpu_upper_bound=about.seq_lens,
        max_seq_len=max(keys),
        block_tables=[g.table[: len(query)] for g in groups],
        slot_mappings=torch.zeros(len(groups), sum(query), dtype=torch.int64),
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
    )
    for group in groups:
        for name in group.layers:
            assert getattr(found[name], STEP).rest.first == 24
            group.check(found[name])


def test_halves_of_a_step_have_builders_of_their_own() -> None:
    """With two micro-batches vLLM builds both before it runs one of them."""
    from vllm.v1.worker.ubatch_utils import UBatchSlice, split_attn_metadata

    layers = {"a": layer()}
    groups = [Group(FULL, layers), Group(FULL, layers)]
    query, keys = [1] * SEQUENCES, [7 * number + 3 for number in range(SEQUENCES)]
    halves = [UBatchSlice(slice(0, 6), slice(0, 6)), UBatchSlice(slice(6, 12), slice(6, 12))]
    parts = split_attn_metadata(halves, common(query, keys, groups[0].table))
    built = [group.builder.build(0, part) for group, part in zip(groups, parts, strict=True)]
    for group, metadata in zip(groups, built, strict=True):
        group.check(metadata)
