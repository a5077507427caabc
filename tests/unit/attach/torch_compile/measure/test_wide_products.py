"""Grouped products in wide floats against PyTorch's, and programs that contain them."""

from __future__ import annotations

import logging
import threading

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor  # noqa: E402

from nostall.attach.torch_compile.measure.accuracy import (  # noqa: E402
    max_error,
    run_graph,
)
from nostall.attach.torch_compile.measure.call import AccuracyError, Call  # noqa: E402
from nostall.attach.torch_compile.measure.reference import (  # noqa: E402
    _without_logs,
    grouped_mm,
    wide_reference,
)

GROUPS, WIDTH = 3, 16


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def ends(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 3).map(lambda n: 8 * n), min_size=GROUPS, max_size=GROUPS),
    st.sampled_from(("rows", "columns", "depth", "no ends")),
)
def test_grouped_products_are_those_of_pytorch(sizes: list[int], along: str) -> None:
    total = max(sum(sizes), 8)
    if not sum(sizes):
        sizes = [0, 0, 8]
    left, right = {
        "rows": (numbers(total, WIDTH), numbers(GROUPS, WIDTH, WIDTH, seed=2)),
        "columns": (numbers(GROUPS, WIDTH, WIDTH), numbers(WIDTH, total, seed=2)),
        "depth": (numbers(WIDTH, total), numbers(total, WIDTH, seed=2)),
        "no ends": (numbers(GROUPS, 8, WIDTH), numbers(GROUPS, WIDTH, WIDTH, seed=2)),
    }[along]
    right = right.transpose(-2, -1).contiguous().transpose(-2, -1)
    offs = None if along == "no ends" else ends(sizes)
    expected = torch._grouped_mm(left, right, offs=offs)
    found = grouped_mm(left.double(), right.double(), offs)
    assert found.dtype is torch.float64
    torch.testing.assert_close(found.bfloat16(), expected, rtol=2**-6, atol=2**-4)


def test_rows_behind_the_last_group_are_zero() -> None:
    left, right = numbers(24, WIDTH).double(), numbers(GROUPS, WIDTH, WIDTH).double()
    result = grouped_mm(left, right, ends([8, 0, 8]))
    assert bool((result[16:] == 0).all())
    torch.testing.assert_close(result[8:16], left[8:16] @ right[2])


def test_a_bias_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="bias"):
        grouped_mm(numbers(8, 8), numbers(1, 8, 8), ends([8]), bias=numbers(8))


def experts(x: Tensor, weight: Tensor, offs: Tensor) -> tuple[Tensor]:
    """Experts whose operands and gradients are results of other operators."""
    hidden = torch._grouped_mm((x.float() * 2).to(x.dtype), weight, offs=offs)
    return (torch.log_softmax(hidden.float(), -1).to(x.dtype),)


def experts_off_by(factor: float, x: Tensor, weight: Tensor, offs: Tensor) -> tuple[Tensor]:
    return (experts(x, weight, offs)[0] * factor,)


def test_experts_have_a_reference_with_gradients_and_log_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x, weight = numbers(24, WIDTH).requires_grad_(), numbers(GROUPS, WIDTH, WIDTH).requires_grad_()
    call = Call.record((x, weight, ends([8, 8, 8])), frozenset())
    seeds = run_graph(experts, call.fresh_args()).seeds
    with caplog.at_level(logging.DEBUG):
        reference = wide_reference(run_graph, experts, call, seeds)
    assert [gradient.dtype for gradient in reference.gradients] == [torch.float64, torch.float64]
    assert reference.longest_sum == len(x)
    assert "fake_tensor" not in {record.name.rsplit(".", 1)[-1] for record in caplog.records}
    max_error(experts, experts, call, seeds, experts)
    with pytest.raises(AccuracyError, match="rounding errors"):
        max_error(experts, lambda *a: experts_off_by(1.1, *a), call, seeds, experts)


def test_attention_without_dropout_has_a_reference_and_with_dropout_the_refusal_says_so() -> None:
    x = numbers(2, 4, 8, WIDTH)
    call = Call.record((x,), frozenset())

    def attention(p: float, x: Tensor) -> tuple[Tensor]:
        return (torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=p),)

    def without(x: Tensor) -> tuple[Tensor]:
        return attention(0.0, x)

    assert wide_reference(run_graph, without, call, []).results[0].dtype is torch.float64
    with pytest.raises(AccuracyError, match=r"there is no reference: it draws random numbers"):
        max_error(without, lambda x: (without(x)[0] + 1,), call, [], lambda x: attention(0.5, x))


def test_logs_of_other_threads_stay_and_come_back(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    inside, leave = threading.Event(), threading.Event()

    def check() -> None:
        with _without_logs():
            logger.error("not shown")
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=check)
    with caplog.at_level(logging.DEBUG):
        thread.start()
        assert inside.wait(30)
        logger.error("of another thread")
        with _without_logs():
            leave.set()
            thread.join(30)
        logger.error("behind both")
    assert [record.message for record in caplog.records] == ["of another thread", "behind both"]
    assert not logger.disabled
