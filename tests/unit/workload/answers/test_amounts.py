"""FLOP and bytes of recorded operators, with PyTorch's own counting as the oracle."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nostall.workload.traces.amounts import Amounts, amounts

torch = pytest.importorskip("torch")


def counted(operator: str, dims: Any, types: Any, plain: Any = ()) -> Amounts | None:
    return amounts(operator, *(json.dumps(one).encode() for one in (dims, types, plain)))


SMALL = st.integers(1, 3)


@settings(deadline=None, max_examples=40)
@given(SMALL, st.integers(1, 2), SMALL, SMALL, st.integers(0, 2), SMALL, SMALL, st.integers(5, 9))
def test_convolutions_are_those_that_pytorch_counts(
    batch: int, groups: int, out: int, kernel: int, pad: int, stride: int, dilate: int, size: int
) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.empty(batch, 4 * groups, size, size + 1, device="meta")
    weight = torch.empty(out * groups, 4, kernel, 2, device="meta")
    if dilate * (kernel - 1) + 1 > size + 2 * pad:
        return
    how = ((stride, 1), (pad, 1), (dilate, 1))
    with FlopCounterMode(display=False) as counter:
        y = torch.ops.aten.convolution(x, weight, None, *how, False, (0, 0), groups)
    strides, paddings, dilations = (str(list(pair)) for pair in how)
    plain = ["", "", paddings, strides, dilations, str(groups), "False", "False", "True"]
    dims = [list(x.shape), list(weight.shape), *([],) * 7]
    types = ["float", "float", "ScalarList", "ScalarList", "ScalarList", *("Scalar",) * 4]
    found = counted("aten::cudnn_convolution", dims, types, plain)
    moved = 4 * (x.numel() + weight.numel() + y.numel())
    assert found == Amounts(counter.get_total_flops(), moved, "fp32")
    # Its gradients: either product is as large.
    dims = [list(y.shape), list(x.shape), list(weight.shape)]
    assert counted("aten::convolution_backward", dims, ["float"] * 3) == found


@pytest.mark.parametrize(
    ("operator", "dims", "types", "size"),
    [
        ("aten::add", [[8, 4], [4], []], ["float", "float", "Scalar"], 4 * (32 + 4 + 32)),
        ("aten::add_", [[8], [8]], ["c10::BFloat16"] * 2, 2 * 24),
        ("aten::gelu_backward", [[6], [6], []], ["c10::Half", "c10::Half", ""], 2 * 18),
        ("aten::native_layer_norm", [[9, 5], [], [5]], ["float", "", "float"], 4 * 95),
        ("aten::sum", [[9, 5], []], ["float", ""], 4 * 45),
        ("aten::fill_", [[7], []], ["double", "Scalar"], 8 * 7),
        ("aten::copy_", [[6], [6], []], ["c10::Half", "float", "Scalar"], 2 * 6 + 4 * 6),
    ],
)
def test_a_pass_moves_every_tensor_once(operator: str, dims: Any, types: Any, size: int) -> None:
    found = counted(operator, dims, types)
    assert found is not None and (found.size, found.precision) == (size, "fp32")


@pytest.mark.parametrize(
    ("operator", "dims", "types", "plain"),
    [
        ("aten::add", [[8], [8]], ["float", "bool"], []),
        ("aten::add", [[], []], ["float", "float"], []),
        ("aten::add", [[8], [8]], ["float"], []),
        ("aten::cudnn_convolution", [[1, 4, 8, 8], [4, 4, 3, 3]], ["float"] * 2, []),
        ("aten::cudnn_convolution", [[1, 4, 8, 8], [4, 4, 3, 3]], ["float"] * 2, [""] * 9),
        ("aten::cudnn_convolution", [[4, 8], [4, 4]], ["float"] * 2, ["", "", "[]", "[]", "[]"]),
        ("aten::convolution_backward", [[1, 4, 8], [1, 4]], ["float"] * 2, []),
        ("aten::_flash_attention_forward", [[8]], ["float"], []),
    ],
)
def test_what_is_not_known_well_enough_is_not_counted(
    operator: str, dims: Any, types: Any, plain: Any
) -> None:
    assert counted(operator, dims, types, plain) is None
