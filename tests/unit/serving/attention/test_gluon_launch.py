"""What the Gluon kernel supports, and the errors of what it does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nostall.core.errors import BadInput
from nostall.serving.attention.config import AttentionShape, KernelConfig, TileConfig
from nostall.serving.attention.gluon_launch import check_gluon, has_gluon_kernel, supports_gluon
from nostall.serving.attention.launch import PagedCache
from nostall.serving.attention.rules import GLUON, GLUON_PLANS, PLANS, BatchKind, plan_for

SHAPE = AttentionShape()


def tensors(dtype: torch.dtype = torch.bfloat16, pad: int = 0) -> tuple[Tensor, PagedCache]:
    """Queries and a cache whose heads lie ``pad`` elements apart."""
    query = torch.zeros(5, 32, 128, dtype=torch.bfloat16)
    cache = torch.zeros(2, 3, 16, 8, 128 + pad, dtype=dtype)[..., :128]
    return query, PagedCache(cache[0], cache[1])


@pytest.mark.parametrize(
    ("shape", "is_supported"),
    [
        (AttentionShape(), True),
        (AttentionShape(28, 4, head_dim=64, page_size=48), True),
        (AttentionShape(head_dim=96), False),
        (AttentionShape(head_dim=256), False),
        (AttentionShape(window=64), False),
        (AttentionShape(soft_cap=30.0), False),
        (AttentionShape(has_trees=True), False),
    ],
)
def test_shapes(shape: AttentionShape, is_supported: bool) -> None:
    query, cache = tensors()
    assert supports_gluon(shape) == is_supported
    if is_supported:
        check_gluon(shape, query, cache, query)
    else:
        with pytest.raises(BadInput, match="take a plan in Triton"):
            check_gluon(shape, query, cache, query)


def test_a_cache_of_another_dtype_is_refused() -> None:
    query, cache = tensors(torch.float8_e4m3fn)
    with pytest.raises(BadInput, match="float8_e4m3fn"):
        check_gluon(SHAPE, query, cache, query)


def test_strides_that_do_not_hold_whole_copies_are_refused() -> None:
    query, cache = tensors(pad=4)
    with pytest.raises(BadInput, match="multiples of 8"):
        check_gluon(SHAPE, query, cache, query)


def test_the_cpu_does_not_run_it() -> None:
    assert not has_gluon_kernel(torch.device("cpu"))


@pytest.mark.parametrize(
    "changes",
    [
        {"tiles": (TileConfig(64, 64),)},
        {"tiles": (TileConfig(16, 64), TileConfig(128, 64))},
        {"tiles": (TileConfig(128, 32),)},
        {"schedule": "ranges"},
        {"front_share": 0.5},
    ],
)
def test_configurations_that_it_cannot_run(changes: dict[str, object]) -> None:
    settings = {"tiles": GLUON.tiles, "front_share": 1.0, "language": "gluon"}
    KernelConfig(**settings)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="Gluon"):
        KernelConfig(**(settings | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("batch", [BatchKind(False, 2048), BatchKind(True, 1), BatchKind(True, 99)])
def test_rules_take_it_where_it_runs(batch: BatchKind) -> None:
    kind = batch.kind(SHAPE.group)
    assert plan_for(SHAPE, batch) == PLANS[kind]
    assert plan_for(SHAPE, batch, has_gluon=True) == GLUON_PLANS.get(kind, PLANS[kind])
    windowed = AttentionShape(window=64)
    assert plan_for(windowed, batch, has_gluon=True) == PLANS[kind]
