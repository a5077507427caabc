"""Accuracy against a reference in higher precision.  Nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from nostall.attach.torch_compile.measure.accuracy import (  # noqa: E402
    AccuracyError,
    max_error,
    run_graph,
)
from nostall.attach.torch_compile.measure.call import Call  # noqa: E402
from nostall.attach.torch_compile.measure.reference import NoReference, wide_reference  # noqa: E402
from nostall.attach.torch_compile.measure.rounding import (  # noqa: E402
    MAX_ELEMENT_FACTOR,
    errors,
    excess,
    has_same_axes,
)

Version = Callable[..., tuple[Tensor, ...]]


def check(baseline: Version, candidate: Version, program: Version, *args: Tensor) -> float:
    call = Call.record(args, frozenset())
    torch.manual_seed(0)
    seeds = run_graph(baseline, call.fresh_args()).seeds
    return max_error(baseline, candidate, call, seeds, program)


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def in_steps(steps: int) -> Version:
    """A sum of exponentials whose parts are rounded ``steps`` times to the dtype of the input."""

    def version(x: Tensor) -> tuple[Tensor]:
        total = torch.zeros_like(x[..., 0])
        for part in x.exp().chunk(steps, -1):
            total = total + part.float().sum(-1).to(x.dtype)
        return (total - x.sum(-1),)

    return version


def program(x: Tensor) -> tuple[Tensor]:
    return (x.exp().sum(-1) - x.sum(-1),)


def test_the_more_accurate_version_may_differ_from_the_other_by_more_than_rounding() -> None:
    x = numbers(8, 4096).to(torch.bfloat16).requires_grad_()
    assert check(in_steps(1024), in_steps(1), program, x) > 0
    with pytest.raises(AccuracyError, match=r"rounding errors.*are allowed"):
        check(in_steps(1), in_steps(1024), program, x)


def test_a_wrong_element_and_a_wrong_gradient_are_errors() -> None:
    def wrong_element(x: Tensor) -> tuple[Tensor]:
        y = x.exp()
        return (y + 0.1 * (torch.arange(y.numel()) == 5).view_as(y),)

    def wrong_gradient(x: Tensor) -> tuple[Tensor]:
        return (x.exp() + 0.01 * (x - x.detach()),)

    x = numbers(16, 16).requires_grad_()
    for wrong in (wrong_element, wrong_gradient):
        with pytest.raises(AccuracyError, match="off by"):
            check(lambda x: (x.exp(),), wrong, lambda x: (x.exp(),), x)


def test_casts_and_factories_of_the_program_are_wide_in_the_reference() -> None:
    def narrow(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = (x.float() @ w.float()).to(torch.float16) + torch.ones(4, dtype=torch.float16)
        return y.softmax(-1, dtype=torch.float32), torch.nn.functional.layer_norm(y, (4,))

    x, w = numbers(8, 32).half().requires_grad_(), numbers(32, 4, seed=2).half().requires_grad_()
    call = Call.record((x, w), frozenset())
    torch.manual_seed(0)
    seeds = run_graph(narrow, call.fresh_args()).seeds
    reference = wide_reference(run_graph, narrow, call, seeds)
    assert reference is not None and reference.longest_sum == 32
    assert {value.dtype for value in (*reference.results, *reference.gradients)} == {torch.float64}
    a, b = x.detach().double(), w.detach().double()
    torch.testing.assert_close(reference.results[0], (a @ b + 1).softmax(-1))


def test_programs_with_random_numbers_are_compared_with_each_other() -> None:
    def version(x: Tensor) -> tuple[Tensor]:
        return (x * torch.rand_like(x),)

    assert check(version, version, version, numbers(4, 4)) == 0.0
    with pytest.raises(AccuracyError, match="of its size"):
        check(version, lambda x: (version(x)[0] * 1.01,), version, numbers(4, 4))


def test_mutated_arguments_have_a_reference() -> None:
    def update(error: float) -> Any:
        def version(x: Tensor, state: Tensor) -> tuple[Tensor]:
            state.mul_(0.9).add_(x.mean() * (1 + error))
            return (x * 2,)

        return version

    call = Call.record((numbers(64), torch.ones(1)), frozenset({1}))
    assert max_error(update(0), update(1e-7), call, [], update(0)) < 1e-6
    with pytest.raises(AccuracyError, match="off by"):
        max_error(update(0), update(1e-2), call, [], update(0))


def test_integers_may_differ_where_rounding_decides() -> None:
    x = numbers(1 << 14).double()
    reference = (x * 20).round().to(torch.int8)
    close, wrong = reference.clone(), reference.clone()
    close[:20] += 1
    wrong[:200] += 1
    none = errors(reference, reference)
    assert excess(close, errors(reference, close), none, 1) == ""
    assert "200 elements differ" in excess(wrong, errors(reference, wrong), none, 1)


def test_overflow_and_nan_have_to_be_those_of_the_reference() -> None:
    exact = torch.tensor([1e5, -1e5, 1.0, float("nan"), float("inf")], dtype=torch.float64)
    right = exact.half()
    assert errors(exact, right).worst < 1
    for place, value in enumerate((1.0, float("inf"), float("nan"), 0.0, float("-inf"))):
        wrong = right.clone()
        wrong[place] = value
        assert errors(exact, wrong).worst > 100 * MAX_ELEMENT_FACTOR


def test_an_overflow_of_inductors_version_does_not_allow_other_errors() -> None:
    def overflows(x: Tensor) -> tuple[Tensor]:
        return ((x * 300).square() / 300,)

    def wrong(x: Tensor) -> tuple[Tensor]:
        y = x.double().square() * 300
        y[1] *= 1.1
        return (y.half(),)

    def exact(x: Tensor) -> tuple[Tensor]:
        return ((x.double().square() * 300).half(),)

    x = torch.tensor([1.0, 0.5, 0.25], dtype=torch.float16)
    assert overflows(x)[0].isinf().tolist() == [True, False, False]
    check(overflows, exact, lambda x: (x.square() * 300,), x)
    with pytest.raises(AccuracyError, match="off by"):
        check(overflows, wrong, lambda x: (x.square() * 300,), x)


def test_padded_strides_are_accepted_and_other_orders_of_axes_are_not() -> None:
    x = torch.zeros(4, 6)
    padded = torch.zeros(4, 8)[:, :6]
    assert has_same_axes(x, padded)
    assert not has_same_axes(x, torch.zeros(6, 4).t())
    assert not has_same_axes(x, torch.zeros(1, 6).expand(4, 6))
    assert not has_same_axes(x, x.half())
    assert (
        check(
            lambda x: (x * 2,), lambda x: (torch.cat([x, x], 1)[:, :6] * 2,), lambda x: (x * 2,), x
        )
        == 0
    )


@torch.library.custom_op("nostall_tests::narrow_product", mutates_args=())
def narrow_product(a: Tensor, b: Tensor) -> Tensor:
    """A matrix product that refuses all dtypes but bf16, like PyTorch's grouped one."""
    if a.dtype != torch.bfloat16 or b.dtype != torch.bfloat16:
        raise RuntimeError(f"expected bfloat16, got {a.dtype} and {b.dtype}")
    return a @ b


def test_an_operator_that_refuses_wide_floats_does_not_cost_the_reference() -> None:
    a, b = (numbers(16, 16, seed=seed).to(torch.bfloat16) for seed in (1, 2))

    def program(a: Tensor, b: Tensor) -> tuple[Tensor]:
        return (narrow_product(a.exp(), b).float().softmax(-1).to(a.dtype),)

    call = Call.record((a, b), frozenset())
    reference = wide_reference(run_graph, program, call, [])
    assert reference is not None
    assert reference.results[0].dtype == torch.float64

    def with_error(error: float) -> Version:
        return lambda a, b: (program(a, b)[0] * (1 + error),)

    assert 0 < check(program, with_error(2**-8), program, a, b) < 2**-7
    # Rounded inputs move this softmax by one to two rounding errors, as the noise is drawn, which
    # versions of PyTorch do differently.
    with pytest.raises(AccuracyError, match="off by"):
        check(program, with_error(2**-3), program, a, b)
    wide = (a.float().exp() @ b.float()).softmax(-1)
    torch.testing.assert_close(reference.results[0].float(), wide, rtol=0.1, atol=0.05)


def test_a_program_of_wide_floats_that_an_operator_refuses_has_no_reference() -> None:
    a = numbers(4, 4)
    call = Call.record((a, a), frozenset())
    with pytest.raises(NoReference):
        wide_reference(run_graph, lambda a, b: (narrow_product(a, b),), call, [])


def test_an_operator_that_refuses_wide_floats_gets_the_dtypes_of_the_program() -> None:
    """The operands of the product are bf16; the program has fp16 and fp8 elsewhere."""
    a, b = (numbers(16, 16, seed=seed).half().requires_grad_() for seed in (1, 2))

    def program(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        left, right = (x.exp().to(torch.bfloat16) for x in (a, b))
        scale = a.float().mean().to(torch.float8_e4m3fn).float()
        product = narrow_product(left.detach().t(), right.detach())
        return (product.half() * scale + a,)

    call = Call.record((a, b), frozenset())
    seeds = run_graph(program, call.fresh_args()).seeds
    reference = wide_reference(run_graph, program, call, seeds)
    assert reference is not None
    torch.testing.assert_close(reference.results[0].half(), program(a, b)[0], rtol=0.1, atol=0.1)


def test_an_operator_that_gets_other_dtypes_in_the_program_has_no_reference() -> None:
    """The product would run on bf16, but the program gives it fp32, which it refuses."""
    a = numbers(4, 4).to(torch.bfloat16)
    call = Call.record((a,), frozenset())
    with pytest.raises(NoReference):
        wide_reference(run_graph, lambda a: (narrow_product(a.float(), a),), call, [])


def test_dtypes_that_an_operator_does_not_tell_are_not_guessed() -> None:
    a = numbers(4, 4).to(torch.bfloat16)

    def program(a: Tensor) -> tuple[Tensor]:
        chosen = a[a.sum(-1) < 100]  # its shape depends on the values
        return (narrow_product(chosen, a),)

    assert program(a)[0].shape == (4, 4)
    with pytest.raises(NoReference):
        wide_reference(run_graph, program, Call.record((a,), frozenset()), [])


def cancelled(noise: float) -> Version:
    """Softmax of scores plus a bias of all keys, whose gradient is 0 but for rounding."""

    class Bias(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, scores: Tensor, bias: Tensor) -> Any:
            ctx.shape = bias.shape
            return scores + bias

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            scale = noise * float(torch.finfo(gradient.dtype).eps) * gradient.float().norm()
            off = scale * torch.ones(ctx.shape) if noise else gradient.sum().expand(ctx.shape)
            return gradient, off.to(gradient.dtype)

    def version(x: Tensor, bias: Tensor) -> tuple[Tensor]:
        return (Bias.apply(x, bias).softmax(-1) @ x.mT,)

    return version


def test_a_gradient_that_is_0_but_for_rounding_is_judged_by_the_largest() -> None:
    """As that of a bias of attention's keys: fused attention rounds other terms."""
    x = numbers(64, 64).to(torch.bfloat16).requires_grad_()
    bias = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)

    def exact(x: Tensor, bias: Tensor) -> tuple[Tensor]:
        return ((x + bias).softmax(-1) @ x.mT,)

    check(cancelled(1e-4), cancelled(1e-3), exact, x, bias)
    with pytest.raises(AccuracyError, match="off by"):
        check(cancelled(1e-4), cancelled(10.0), exact, x, bias)


def test_a_small_gradient_that_the_other_version_computes_is_judged_by_its_own_size() -> None:
    x = numbers(64, 64).to(torch.bfloat16).requires_grad_()
    small = (1e-4 * numbers(64, seed=2)).to(torch.bfloat16).requires_grad_()

    def version(factor: float) -> Version:
        def run(x: Tensor, small: Tensor) -> tuple[Tensor]:
            return (x.exp() + factor * 1e-5 * small + (1 - factor) * 1e-5 * small.detach(),)

        return run

    check(version(1.0), version(1.0), version(1.0), x, small)
    with pytest.raises(AccuracyError, match="off by"):
        check(version(1.0), version(1.2), version(1.0), x, small)
