"""FLOP and bytes of recorded operators, compared with PyTorch's FLOP counter."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nostall.workload.traces.operator_cost import OperatorCost, operator_cost

torch = pytest.importorskip("torch")


def cost(operator: str, shapes: Any, dtypes: Any, values: Any = ()) -> OperatorCost | None:
    return operator_cost(operator, *(json.dumps(v).encode() for v in (shapes, dtypes, values)))


small = st.integers(1, 3)


@settings(deadline=None, max_examples=40)
@given(small, st.integers(1, 2), small, small, st.integers(0, 2), small, small, st.integers(5, 9))
def test_flops_of_convolutions_are_those_of_pytorch(
    batch: int, groups: int, out: int, kernel: int, pad: int, stride: int, dilate: int, size: int
) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.empty(batch, 4 * groups, size, size + 1, device="meta")
    weight = torch.empty(out * groups, 4, kernel, 2, device="meta")
    if dilate * (kernel - 1) + 1 > size + 2 * pad:
        return
    options = ((stride, 1), (pad, 1), (dilate, 1))
    with FlopCounterMode(display=False) as counter:
        y = torch.ops.aten.convolution(x, weight, None, *options, False, (0, 0), groups)
    strides, paddings, dilations = (str(list(pair)) for pair in options)
    values = ["", "", paddings, strides, dilations, str(groups), "False", "False", "True"]
    shapes = [list(x.shape), list(weight.shape), *([],) * 7]
    dtypes = ["float", "float", "ScalarList", "ScalarList", "ScalarList", *("Scalar",) * 4]
    forward = cost("aten::cudnn_convolution", shapes, dtypes, values)
    moved = 4 * (x.numel() + weight.numel() + y.numel())
    assert forward == OperatorCost(counter.get_total_flops(), moved, "fp32")
    # Each of the two products of the backward pass costs as much.
    shapes = [list(y.shape), list(x.shape), list(weight.shape)]
    assert cost("aten::convolution_backward", shapes, ["float"] * 3) == forward


@pytest.mark.parametrize(
    ("operator", "shapes", "dtypes", "size"),
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
def test_memory_bound_operators_move_each_tensor_once(
    operator: str, shapes: Any, dtypes: Any, size: int
) -> None:
    counted = cost(operator, shapes, dtypes)
    assert counted is not None
    assert (counted.bytes_moved, counted.precision) == (size, "fp32")


@pytest.mark.parametrize(
    ("operator", "shapes", "dtypes", "values"),
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
def test_incomplete_or_unknown_arguments_have_no_cost(
    operator: str, shapes: Any, dtypes: Any, values: Any
) -> None:
    assert cost(operator, shapes, dtypes, values) is None
