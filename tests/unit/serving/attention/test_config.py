"""Shapes, configurations and rules of meta-attention, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nostall.core.errors import BadInput
from nostall.serving.attention.config import (
    WIDE_HEAD_KERNEL,
    AttentionPlan,
    AttentionShape,
    KernelConfig,
)
from nostall.serving.attention.launch import FP8, PagedCache, Scales, check_tensors
from nostall.serving.attention.rules import PLANS, BatchKind, is_faster_than_fa3, plan_for
from nostall.serving.tables.orders import ORDERS

SHAPE = AttentionShape(8, 2, 64)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 6, "kv_heads": 4}, "6 query heads and 4 KV heads"),
        ({"kv_heads": 0}, "0 KV heads"),
        ({"head_dim": 80}, r"head dimension 80; allowed are \(64, 96, 128, 256\)"),
        ({"page_size": 8}, "page size 8; allowed are multiples of 16"),
        ({"page_size": 24}, "page size 24"),
        ({"window": -1}, "window -1"),
        ({"soft_cap": -0.5}, "soft cap -0.5"),
    ],
)
def test_shapes_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        AttentionShape(**fields)


@pytest.mark.parametrize("order", ORDERS)
def test_programs_of_ranges_need_an_order_that_deals_to_programs(order: str) -> None:
    kernel = KernelConfig(schedule="ranges")
    if ORDERS[order].is_persistent:
        assert AttentionPlan(kernel, order).order == order
    else:
        with pytest.raises(BadInput, match=f"schedule ranges and order {order}"):
            AttentionPlan(kernel, order)


def cache(*size: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(size, dtype=dtype)


QUERY = cache(3, 8, 64)
KEYS = cache(4, 16, 2, 64)


@pytest.mark.parametrize(
    ("query", "keys", "values", "out", "message"),
    [
        (
            cache(3, 7, 64),
            KEYS,
            KEYS,
            cache(3, 7, 64),
            r"allowed are two tensors \(tokens, 8, 64\)",
        ),
        (QUERY, KEYS, KEYS, QUERY.float(), "of one dtype"),
        (QUERY, cache(4, 32, 2, 64), cache(4, 32, 2, 64), QUERY, r"\(blocks, 16, 2, 64\)"),
        (QUERY, KEYS, KEYS.float(), QUERY, "of one dtype"),
        (QUERY, KEYS, cache(4, 16, 2, 128)[..., :64], QUERY, "the same strides"),
        (cache(3, 64, 8).mT, KEYS, KEYS, QUERY, "heads must be contiguous"),
        (QUERY.to(FP8), KEYS, KEYS, QUERY, "of one dtype, or a query and a cache of"),
        (QUERY.to(FP8), KEYS.to(FP8), KEYS.to(FP8), QUERY.to(FP8), "a result of more bits"),
        (QUERY.to(FP8), KEYS.to(FP8), KEYS.to(FP8), QUERY, "with scales False"),
        (QUERY, KEYS, KEYS, cache(3, 64, 8).mT, "strides of the result"),
    ],
)
def test_tensors_that_are_refused(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor, message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        check_tensors(SHAPE, query, PagedCache(keys, values), out)


def test_scales_belong_to_fp8() -> None:
    scales, pages = Scales(*torch.ones(3)), KEYS.to(FP8)
    check_tensors(SHAPE, QUERY.to(FP8), PagedCache(pages, pages, scales), QUERY)
    with pytest.raises(BadInput, match="with scales True"):
        check_tensors(SHAPE, QUERY, PagedCache(KEYS, KEYS, scales), QUERY)


def test_a_cache_whose_keys_and_values_share_a_tensor() -> None:
    both = cache(4, 2, 16, 2, 64)
    check_tensors(SHAPE, QUERY, PagedCache(both[:, 0], both[:, 1]), QUERY)


@pytest.mark.parametrize(
    ("batch", "kind"),
    [
        (BatchKind(True, 1), "decode"),
        (BatchKind(True, 8), "decode and verify"),
        (BatchKind(False, 32), "verify"),
        (BatchKind(True, 33), "mixed"),
        (BatchKind(False, 2048), "prefill"),
    ],
)
def test_the_kind_of_a_batch(batch: BatchKind, kind: str) -> None:
    assert batch.kind(group=4) == kind
    assert plan_for(AttentionShape(), batch) is PLANS[kind]  # type: ignore[index]


def test_decodes_of_many_heads_take_tiles_that_hold_them() -> None:
    assert BatchKind(True, 1).kind(group=32) == "decode and verify"


def test_wide_heads_have_their_own_kernel() -> None:
    plan = plan_for(AttentionShape(head_dim=256), BatchKind(True, 1))
    assert plan.kernel.tiles == WIDE_HEAD_KERNEL.tiles


def test_plans_take_units_from_a_queue_so_that_a_graph_holds_their_launch() -> None:
    for head_dim in (128, 256):
        captured = plan_for(AttentionShape(head_dim=head_dim), BatchKind(True, 8))
        assert (captured.kernel.schedule, captured.order) == ("queue", "sorted")


@pytest.mark.parametrize(
    ("batch", "sequences", "is_faster"),
    [
        (BatchKind(True, 1), 256, True),
        (BatchKind(True, 1), 16, False),
        (BatchKind(True, 32), 132, True),
        (BatchKind(False, 16), 64, False),
        (BatchKind(True, 2048), 65, False),
        (BatchKind(False, 8192), 64, False),
    ],
)
def test_where_fa3_is_slower(batch: BatchKind, sequences: int, is_faster: bool) -> None:
    assert is_faster_than_fa3(AttentionShape(), batch, sequences, 132) == is_faster


@pytest.mark.parametrize(
    ("shape", "gpu", "is_faster"),
    [
        (AttentionShape(32, 8), "NVIDIA H200", True),
        (AttentionShape(28, 4), "NVIDIA H200", True),
        (AttentionShape(4, 1), "NVIDIA H200", True),
        (AttentionShape(32, 8), "NVIDIA A100-SXM4-80GB", False),
        (AttentionShape(32, 8), "NVIDIA H100 80GB HBM3", False),
        (AttentionShape(32, 32), "NVIDIA H200", False),
        (AttentionShape(64, 8), "NVIDIA H200", False),
        (AttentionShape(32, 8, window=4096), "NVIDIA H200", False),
        (AttentionShape(32, 8, soft_cap=30.0), "NVIDIA H200", False),
        (AttentionShape(32, 8, scale=0.1), "NVIDIA H200", False),
        (AttentionShape(32, 8, has_prefixes=True), "NVIDIA H200", False),
        (AttentionShape(32, 8, page_size=32), "NVIDIA H200", False),
        (AttentionShape(32, 8, head_dim=64), "NVIDIA H200", False),
    ],
)
def test_only_what_was_measured_is_called_faster(
    shape: AttentionShape, gpu: str, is_faster: bool
) -> None:
    assert is_faster_than_fa3(shape, BatchKind(True, 1), 512, 132, gpu) == is_faster


def test_tiles_in_the_numbers_of_the_kernel() -> None:
    assert KernelConfig().compiled_tiles == ((16, 64, 4, 0), (64, 64, 3, 0), (128, 32, 4, 1))
