"""Attention written as products and a softmax: what is one call is equal to it, in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch._dynamo.backends.debugging import aot_eager  # noqa: E402

from nostall.attach.torch_compile.rewrite.attention import (  # noqa: E402
    ATTENTION,
    CAUSAL,
    DROPPED,
    WRITTEN,
    keep_attention,
)

F = torch.nn.functional
BATCH, HEADS, GROUPS, LENGTH, WIDTH = 2, 4, 2, 6, 8


def leaf(*shape: int, seed: int, dtype: Any = torch.float64) -> Any:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()


def operands(dtype: Any = torch.float64) -> list[Any]:
    return [leaf(BATCH, HEADS, LENGTH, WIDTH, seed=i, dtype=dtype) for i in range(3)]


TABLE = torch.nn.Parameter(leaf(HEADS, LENGTH, LENGTH, seed=7).detach())
FEW = [leaf(BATCH, GROUPS, LENGTH, WIDTH, seed=i) for i in (4, 5)]
PADDING = torch.tensor([[True] * LENGTH, [True] * 4 + [False] * 2])
HIDES_ROWS = torch.tensor([[True] * LENGTH, [False] * LENGTH])
TRIL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def plain(q: Any, k: Any, v: Any) -> Any:
    return (q @ k.transpose(-2, -1) / math.sqrt(WIDTH)).softmax(-1) @ v


def hugging_face(q: Any, k: Any, v: Any) -> Any:
    """As ``eager_attention_forward`` of ``transformers``, with a mask made while it is traced."""
    least = torch.finfo(q.dtype).min
    positions = torch.arange(LENGTH)
    mask = torch.zeros(LENGTH, LENGTH, dtype=q.dtype).masked_fill(
        positions > positions[:, None], least
    )
    weights = torch.matmul(q, k.transpose(2, 3)) * WIDTH**-0.5
    weights = weights + mask[None, None]
    weights = F.softmax(weights, dim=-1, dtype=torch.float64).to(q.dtype)
    weights = F.dropout(weights, p=0.1, training=False)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def grouped(q: Any, k: Any, v: Any) -> Any:
    """Keys and values of groups, repeated; a window that every query sees."""

    def repeated(x: Any) -> Any:
        x = x[:, :, None].expand(BATCH, GROUPS, HEADS // GROUPS, LENGTH, WIDTH)
        return x.reshape(BATCH, HEADS, LENGTH, WIDTH)

    k, v = repeated(FEW[0] + k[:, :GROUPS]), FEW[1].repeat_interleave(HEADS // GROUPS, dim=1) + v
    positions = torch.arange(LENGTH)
    window = (positions[:, None] - positions).abs() < 3
    scores = torch.where(window, (q * 0.3) @ k.mT, float("-inf"))
    return torch.softmax(scores, dim=-1) @ v


def merged(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).masked_fill(~TRIL, float("-inf"))
    return torch.bmm(scores.softmax(dim=-1), v)


def padded(mask: Any, fill: float) -> Callable[..., Any]:
    def program(q: Any, k: Any, v: Any) -> Any:
        scores = q @ k.transpose(-1, -2) * 0.5
        return F.softmax(scores.masked_fill(~mask[:, None, None, :], fill), -1) @ v

    return program


def positions_bias(q: Any, k: Any, v: Any) -> Any:
    slopes = 2.0 ** -torch.arange(1, HEADS + 1, dtype=q.dtype)
    positions = torch.arange(LENGTH)
    distance = (positions[:, None] - positions).abs().to(q.dtype)
    return ((q @ k.mT) * 0.5 + -slopes[:, None, None] * distance).softmax(-1) @ v


def alibi(q: Any, k: Any, v: Any) -> Any:
    """A bias of distances that hides the future, computed from positions."""
    slopes = 2.0 ** (-8.0 / HEADS * torch.arange(1, HEADS + 1))
    at = torch.arange(LENGTH)
    bias = -slopes[:, None, None] * (at[:, None] - at).abs()
    bias = bias.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), float("-inf"))
    return torch.softmax(q @ k.mT / math.sqrt(WIDTH) + bias.to(q.dtype), -1) @ v


def two_masks(is_hidden_first: bool, fill: float) -> Callable[..., Any]:
    """A bias of distances and a causal mask, one after the other."""

    def program(q: Any, k: Any, v: Any) -> Any:
        at = torch.arange(LENGTH)
        distance = -0.25 * (at[:, None] - at).abs().to(q.dtype)
        scores = q @ k.mT
        if is_hidden_first:
            return (scores.masked_fill(at > at[:, None], fill) + distance).softmax(-1) @ v
        return torch.where(at <= at[:, None], scores + distance, fill).softmax(-1) @ v

    return program


JOINED: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "plain": (plain, {WRITTEN}),
    "converted by type": (
        lambda q, k, v: (q @ k.mT).softmax(-1).type(v.dtype) @ v, {WRITTEN}
    ),
    "ALiBi": (alibi, {WRITTEN}),
    "ALiBi, then a mask": (two_masks(False, float("-inf")), {WRITTEN}),
    "a mask, then ALiBi": (two_masks(True, -1e9), {WRITTEN}),
    "as Hugging Face writes it": (hugging_face, {WRITTEN, CAUSAL}),
    "grouped, a window": (grouped, {WRITTEN}),
    "batch and heads merged": (merged, {WRITTEN}),
    "padding, infinite": (padded(PADDING, float("-inf")), {WRITTEN}),
    "padding, finite": (padded(PADDING, -1e9), {WRITTEN}),
    "padding, the least number": (padded(PADDING, torch.finfo(torch.float64).min), {WRITTEN}),
    "hidden rows, infinite": (padded(HIDES_ROWS, float("-inf")), {WRITTEN}),
    "hidden rows, the least number": (
        padded(HIDES_ROWS, torch.finfo(torch.float64).min), {WRITTEN}
    ),
    "a table of positions": (
        lambda q, k, v: ((q @ k.mT) + TABLE.unsqueeze(0)).softmax(-1) @ v, {WRITTEN}
    ),
    "a mask of zeros": (
        lambda q, k, v: ((q @ k.mT) + torch.zeros(LENGTH, LENGTH, dtype=q.dtype)).softmax(-1) @ v,
        {WRITTEN, DROPPED},
    ),
}  # fmt: skip


def scores_without_gradients(q: Any, k: Any, v: Any) -> Any:
    with torch.no_grad():
        scores = q @ k.mT
    return (scores + TABLE).softmax(-1) @ v


def products_in_autocast(q: Any, k: Any, v: Any) -> Any:
    scores = q @ k.mT
    with torch.autocast("cpu", torch.bfloat16):
        weights = scores.softmax(-1)
    return weights @ v


def added_to(q: Any, k: Any, v: Any) -> Any:
    result = plain(q, k, v)
    result += v
    return result


def changed_by_a_view(q: Any, k: Any, v: Any) -> Any:
    result = plain(q, k, v)
    merged = result.transpose(1, 2)
    merged.mul_(2.0)
    return result * 1.0


STAYS: dict[str, tuple[Callable[..., Any], str]] = {
    "scores without gradients": (
        scores_without_gradients, "the gradient mode changes between its products"
    ),
    "a softmax in autocast": (
        products_in_autocast, "autocast changes between its products"
    ),
    "added to its result": (added_to, "an operand or its result is changed in place"),
    "a changed view of its result": (
        changed_by_a_view, "an operand or its result is changed in place"
    ),
    "probabilities as values": (
        lambda q, k, v: (lambda p: p @ p)((q @ k.mT).softmax(-1)),
        "it reads its scores or probabilities as an operand, too",
    ),
    "scores as a mask": (
        lambda q, k, v: (lambda s: (s + s).softmax(-1) @ v)(q @ k.mT),
        "it reads its scores or probabilities as an operand, too",
    ),
    "whole numbers": (
        lambda q, k, v: torch.softmax((q @ k.mT).to(torch.int64), -1, dtype=torch.float64) @ v, ""
    ),
    "probabilities are returned": (
        lambda q, k, v: (lambda p: p @ v + p.sum())((q @ k.mT).softmax(-1)),
        "its probabilities are read otherwise",
    ),
    "a scaled mask": (
        lambda q, k, v: (((q @ k.mT) + TABLE) * 0.5).softmax(-1) @ v, ""
    ),
    "a soft cap": (
        lambda q, k, v: ((q @ k.mT).tanh() * 30.0 + TABLE).softmax(-1) @ v,
        "its scores have a soft cap",
    ),
    "a mask that is not known": (
        lambda q, k, v: ((q @ k.mT) + k.sum(-1)[:, :, None, :]).softmax(-1) @ v,
        "its mask may hide whole rows",
    ),
    "a mask, then a large bias": (
        lambda q, k, v: (
            (q @ k.mT).masked_fill((torch.arange(LENGTH) > 2).expand(LENGTH, LENGTH), -1e9)
            + 1e9 * (torch.arange(LENGTH) > 3).to(q.dtype).expand(LENGTH, LENGTH)
        ).softmax(-1) @ v,
        "it has two masks",
    ),
    "two masks that are not known": (
        lambda q, k, v: ((q @ k.mT).masked_fill(~TRIL, -torch.inf) + TABLE).softmax(-1) @ v,
        "it has two masks",
    ),
    "a small number": (
        lambda q, k, v: (q @ k.mT).masked_fill(~TRIL, -1e4).softmax(-1) @ v, ""
    ),
    "a negative scale": (
        lambda q, k, v: (q @ k.mT / -2.0).masked_fill(
            torch.arange(LENGTH) > torch.arange(LENGTH)[:, None], -torch.inf
        ).softmax(-1) @ v,
        "its scale is not positive",
    ),
    "over queries": (lambda q, k, v: (q @ k.mT).softmax(-2) @ v, ""),
    "a broadcast key": (
        lambda q, k, v: (q @ k[:1].mT).softmax(-1) @ v, "its operands are broadcast"
    ),
}  # fmt: skip


def compiled(function: Callable[..., Any], given: list[Any], with_aot: bool = True) -> Any:
    """With AOTAutograd, which takes long, only where a graph is changed."""

    def backend(module: Any, inputs: Any) -> Any:
        left: list[str] = []
        done = keep_attention(module, left)
        module.graph.lint()
        given.append((done, left, [node.target for node in module.graph.nodes]))
        return aot_eager(module, inputs) if done and with_aot else module.forward

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)


def outcome(function: Callable[..., Any], leaves: list[Any]) -> list[Any]:
    result = function(*leaves[:3])
    seed = torch.arange(1.0, 1.0 + result.numel()).view_as(result).to(result.dtype)
    return [result, *torch.autograd.grad(result, leaves, seed, allow_unused=True)]


def check_equal(function: Callable[..., Any], given: list[Any], with_aot: bool = True) -> None:
    leaves = [*operands(), TABLE, *FEW]
    found = outcome(compiled(function, given, with_aot), leaves)
    expected = outcome(function, leaves)
    torch.testing.assert_close(found[0], expected[0], equal_nan=True)
    for a, b in zip(found[1:], expected[1:], strict=True):
        # Where a program's result is nan, so are its gradients, which a call need not have.
        if b is not None and not b.isnan().any():
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", JOINED)
def test_products_and_a_softmax_are_one_call(name: str) -> None:
    function, changes = JOINED[name]
    traced: list[Any] = []
    check_equal(function, traced)
    ((done, left, targets),) = traced
    assert {line.partition(": ")[2] for line in done} == changes and left == []
    assert ATTENTION in targets
    assert not {torch.softmax, F.softmax, "softmax"} & set(targets)


@pytest.mark.parametrize(
    ("after", "is_copied"),
    [
        (lambda x: x, True),
        (lambda x: x.transpose(1, 2), True),
        (lambda x: (x * 2.0).unsqueeze(0), True),
        (lambda x: x.transpose(1, 2).reshape(BATCH, LENGTH, HEADS * WIDTH), False),
        (lambda x: x @ x.mT, False),
        (lambda x: x.sum((1, 2)), False),
    ],
)
def test_a_result_that_a_graph_returns_keeps_its_layout(after: Any, is_copied: bool) -> None:
    """Fused back ends of GPUs write another one, with which a version is refused."""

    def program(q: Any, k: Any, v: Any) -> Any:
        return after(plain(q, k, v))

    traced: list[Any] = []
    inputs = [x.detach().float() for x in operands()]
    result, expected = compiled(program, traced, with_aot=False)(*inputs), program(*inputs)
    assert result.stride() == expected.stride()
    assert ("contiguous" in traced[0][2]) == is_copied


@given(
    scale=st.sampled_from(("query", "times", "over", "none")),
    mask=st.sampled_from(("none", "causal", "padding", "rows", "table")),
    fill=st.sampled_from((-math.inf, -1e9, torch.finfo(torch.float64).min)),
    selects=st.booleans(),
    product=st.sampled_from((torch.matmul, torch.bmm)),
    is_converted=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_random_forms_are_equal_to_their_parts(
    scale: str, mask: str, fill: float, selects: bool, product: Any, is_converted: bool
) -> None:
    hidden = {"causal": TRIL, "padding": PADDING[:, None, None], "rows": HIDES_ROWS[:, None, None]}
    is_flat = product is torch.bmm

    def program(q: Any, k: Any, v: Any) -> Any:
        if is_flat:
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        scores = product(q * 0.4 if scale == "query" else q, k.transpose(-1, -2))
        scores = scores * 0.4 if scale == "times" else scores / 3 if scale == "over" else scores
        if mask in hidden:
            seen = hidden[mask]
            if is_flat:
                seen = seen.expand(BATCH, HEADS, LENGTH, LENGTH).flatten(0, 1)
            scores = torch.where(seen, scores, fill) if selects else scores.masked_fill(~seen, fill)
        elif mask == "table":
            table = TABLE.repeat(BATCH, 1, 1) if is_flat else TABLE
            scores = scores + table
        weights = torch.softmax(scores, dim=-1)
        return product(weights.to(v.dtype) if is_converted else weights, v)

    traced: list[Any] = []
    check_equal(program, traced, with_aot=False)
    ((done, left, _),) = traced
    # What repeats a table is no look-up that is known.
    is_joined = not (mask == "table" and is_flat)
    assert any(WRITTEN in line for line in done) == is_joined
    assert bool(left) == (not is_joined)


@pytest.mark.parametrize("name", STAYS)
def test_other_forms_stay(name: str) -> None:
    function, reason = STAYS[name]
    traced: list[Any] = []
    check_equal(function, traced)
    ((done, left, targets),) = traced
    assert done == [] and ATTENTION not in targets
    if reason:
        assert left == [f"1 x attention: its products and its softmax stay: {reason}"]


def test_a_bias_that_counts_beside_the_least_number_of_fp16_keeps_its_parts() -> None:
    """Key 1 is seen, and still has less of a row than the hidden key 0."""

    def program(q: Any, k: Any, v: Any) -> Any:
        hidden = (torch.arange(LENGTH) == 0).expand(LENGTH, LENGTH)
        bias = torch.where(hidden, 5e4, -5e4).to(q.dtype)
        scores = (q @ k.mT).masked_fill(hidden, torch.finfo(q.dtype).min)
        return (scores + bias).softmax(-1) @ v

    traced: list[Any] = []
    q, k, v = operands(torch.float16)
    found = compiled(program, traced, with_aot=False)(q, k, v)
    torch.testing.assert_close(found, program(q, k, v), atol=1e-2, rtol=1e-2)


def test_dropout_in_training_stays_because_its_numbers_would_change() -> None:
    def program(q: Any, k: Any, v: Any) -> Any:
        return F.dropout((q @ k.mT).softmax(-1), 0.1, True) @ v

    traced: list[Any] = []
    compiled(program, traced)(*operands())
    ((done, left, _),) = traced
    assert done == []
    assert left == ["1 x attention: its products and its softmax stay: it has dropout"]


@pytest.mark.parametrize("is_converted", [False, True])
def test_an_operand_that_changes_between_the_products_keeps_them(is_converted: bool) -> None:
    def program(q: Any, k: Any, v: Any) -> Any:
        q = q * 1.0
        weights = (q @ k.mT).softmax(-1)
        q.zero_()
        weights = weights.to(v.dtype) if is_converted else weights
        return weights @ v + q

    traced: list[Any] = []
    q, k, v = (x.detach() for x in operands())
    torch.testing.assert_close(compiled(program, traced)(q, k, v), program(q, k, v))
    assert traced[0][0] == []


def test_an_attention_that_fails_leaves_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise ValueError("no mask")

    monkeypatch.setattr("nostall.attach.torch_compile.rewrite.written_attention._mask", fails)
    traced: list[Any] = []
    check_equal(plain, traced)
    ((done, _, targets),) = traced
    assert done == [] and ATTENTION not in targets
    assert targets.count("transpose") == 1


def test_one_call_is_at_least_as_exact_as_its_parts_in_bf16() -> None:
    narrow = operands(torch.bfloat16)
    exact = outcome(plain, [x.detach().double().requires_grad_() for x in narrow])
    traced: list[Any] = []
    joined, parts = outcome(compiled(plain, traced), narrow), outcome(plain, narrow)
    assert traced[0][0] == [f"1 x attention: {WRITTEN}"]
    for a, b, wide in zip(joined, parts, exact, strict=True):
        with torch.no_grad():
            errors = [float((x.double() - wide).norm() / wide.norm()) for x in (a, b)]
        assert errors[0] < 1.2 * errors[1]
