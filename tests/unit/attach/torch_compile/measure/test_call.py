"""Copies of a call's arguments: padded strides, elements that share memory."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from nostall.attach.torch_compile.measure.accuracy import _perturbed  # noqa: E402
from nostall.attach.torch_compile.measure.call import (  # noqa: E402
    Call,
    clone_with_strides,
    distinct_elements,
)

SHAPES = ((4, 3, 5), (1, 3, 1), (0, 3))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("padding", [0, 3])
def test_a_copy_has_the_strides_of_its_original(shape: tuple[int, ...], padding: int) -> None:
    padded = torch.randn(*shape[:-1], shape[-1] + padding)[..., : shape[-1]]
    column = padded[..., :1]
    expanded = (padded[None].expand(2, *shape), column.expand(*shape[:-1], 7))
    for value in (padded, padded.transpose(0, 1), column, *expanded):
        before, copy = value.clone(), clone_with_strides(value)
        assert copy.stride() == value.stride() and torch.equal(copy, value)
        copy.untyped_storage().fill_(0)
        assert torch.equal(value, before)


def test_a_recorded_call_keeps_padded_strides_and_gradients() -> None:
    logits = torch.randn(4, 6, 8)[..., :5].requires_grad_()
    call = Call((logits, 3), frozenset((0,)), grad=True, inference=False)
    copied = call.copy()
    assert copied.args[0].stride() == logits.stride() and copied.args[0].requires_grad
    (fresh, number) = copied.fresh_args()
    assert fresh.stride() == logits.stride() and fresh.requires_grad and number == 3
    # PyTorch refuses to change a leaf with a gradient in place.
    assert not fresh.is_leaf and torch.equal(fresh.mul_(2), 2 * logits)
    (unchanged, _) = Call(copied.args, frozenset(), grad=True, inference=False).fresh_args()
    assert unchanged.stride() == logits.stride() and unchanged.is_leaf
    assert _perturbed(logits).stride() == logits.stride()
    assert not torch.equal(_perturbed(logits), logits)


def test_elements_that_share_memory_are_perturbed_together() -> None:
    torch.manual_seed(0)  # half of all steps are too small to change a number
    row = torch.randn(1, 6)
    windows = torch.randn(10).unfold(0, 4, 2)
    for value, count in (
        (row.expand(3, 6), 6),
        (windows, 10),
        (windows[:, None].expand(4, 2, 4), 10),
    ):
        perturbed = _perturbed(value)
        assert perturbed.stride() == value.stride()
        assert perturbed.unique().numel() == count == value.unique().numel()
        assert not torch.equal(perturbed, value)
        torch.testing.assert_close(perturbed, value)
        copy = clone_with_strides(value)
        assert torch.equal(copy, value) and copy.stride() == value.stride()


def test_a_column_is_copied_without_the_other_columns() -> None:
    cache = torch.randn(64, 128)
    assert distinct_elements(cache[:, 3]).numel() == 64
    cache[:, 4:] = float("nan")
    assert torch.equal(clone_with_strides(cache[:, 3]), cache[:, 3])
