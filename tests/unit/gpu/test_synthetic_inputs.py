"""Synthetic inputs: layouts, value ranges and reproducibility."""

from __future__ import annotations

import pytest
import torch

from nostall.gpu.synthetic_inputs import Layout, synthetic_inputs

CPU = torch.device("cpu")
LAYOUTS: list[Layout] = [
    ((4, 8), (8, 1), torch.float32),
    ((4, 8), (1, 4), torch.bfloat16),
    ((4, 8), (100, 2), torch.float64),
    ((4, 8), (0, 1), torch.float16),
    ((0, 8), (8, 1), torch.float32),
    ((), (), torch.int64),
    ((300,), (1,), torch.int32),
    ((300,), (1,), torch.bool),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_have_the_given_layout(layout: Layout) -> None:
    shape, strides, dtype = layout
    (tensor,) = synthetic_inputs([layout], CPU)
    assert tuple(tensor.shape) == shape
    assert tensor.stride() == strides
    assert tensor.dtype == dtype
    assert tensor.device == CPU


def test_values_are_normally_distributed_or_small_integers() -> None:
    layouts: list[Layout] = [((1000,), (1,), t) for t in (torch.float32, torch.int8, torch.bool)]
    floats, integers, booleans = synthetic_inputs(layouts, CPU)
    assert abs(float(floats.mean())) < 0.1 and 0.9 < float(floats.std()) < 1.1
    assert set(integers.tolist()) == {0, 1}
    assert set(booleans.tolist()) == {False, True}


def test_inputs_are_reproducible_and_differ_from_each_other() -> None:
    layouts: list[Layout] = [((64,), (1,), torch.float32)] * 2
    state = torch.get_rng_state()
    first, second = synthetic_inputs(layouts, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(first, second)
    for tensor, repeated in zip((first, second), synthetic_inputs(layouts, CPU), strict=True):
        assert torch.equal(tensor, repeated)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_contiguous_values_are_drawn_in_order_of_memory(dtype: torch.dtype) -> None:
    (tensor,) = synthetic_inputs([((6, 50), (50, 1), dtype)], CPU)
    generator = torch.Generator(CPU).manual_seed(0)
    if dtype.is_floating_point:
        expected = torch.randn((6, 50), generator=generator).to(dtype)
    else:
        expected = torch.empty((6, 50), dtype=dtype).random_(0, 2, generator=generator)
    assert torch.equal(tensor, expected)
